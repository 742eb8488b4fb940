"""Batches for the accept kernels, and the kernels as the CPU runs them."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import torch

from faser_trtllm import native
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.accept import PART_ENTRIES, Stages, accept, workspace_bytes
from tests.ops.cuda.emulation import EmulatedModule, skip_without_a_compiler
from tests.support.sampling_slots import Slots

MODES = (native.GREEDY, native.SEEDED, native.SAMPLED)
FIELDS = [field.name for field in dataclasses.fields(AcceptResult) if not field.kw_only]


SMALL_BLOCK = {"FASER_BLOCK_THREADS": 64, "FASER_THREAD_ENTRIES": 4}
SMALL_PART = 256  # entries of a part of a row, with SMALL_BLOCK


def small(kernel, block):
    """The block that a kernel compiled with SMALL_BLOCK is launched with."""
    return (64, 1, 1) if block[0] == 512 else block


class SmallBlocks(EmulatedModule):
    """The emulated kernels of a stem with 64 threads and buckets per block: quick, and the cut takes more levels."""

    def __init__(self, order=0, stem="accept"):
        skip_without_a_compiler()
        super().__init__(stem, SMALL_BLOCK, order)

    def launch(self, kernel, grid, block, arguments, stream=0):
        super().launch(kernel, grid, small(kernel, block), arguments, stream)


class FewBlocks(SmallBlocks):
    """The same, with stages of two blocks after the first: each processes several parts."""

    def launch(self, kernel, grid, block, arguments, stream=0):
        is_later = any(f"_{stage}" in kernel for stage in Stages.ALL.value[1:])
        super().launch(kernel, (min(grid[0], 2), 1, 1) if is_later else grid, block, arguments, stream)


class SmallLaunches:
    """The same of any module compiled with SMALL_BLOCK."""

    def __init__(self, module):
        self._module = module

    def launch(self, kernel, grid, block, arguments, stream=0):
        self._module.launch(kernel, grid, small(kernel, block), arguments, stream)


def run(
    launcher,
    sampling,
    slots,
    logits,
    vocab_size,
    cu_logit_rows,
    num_tokens,
    num_drafts,
    max_draft_len,
    edits=True,
    part_entries=PART_ENTRIES,
    stages=Stages.ALL,
    space="enough",
):
    """accept with the arguments of the reference; a copy of what the device was given is host memory here."""
    n, num_rows = slots.size, logits.shape[0]
    shapes = [(n + 1, max_draft_len + 1), *[(n + 1,)] * 4]
    memory = [torch.full(shape, 77, dtype=torch.int32) for shape in shapes]
    if isinstance(space, str):
        space = torch.zeros(workspace_bytes(num_rows, vocab_size, part_entries), dtype=torch.uint8)
    table = torch.from_numpy(sampling.view(np.uint8).reshape(-1, SAMPLING_DTYPE.itemsize))
    accept(
        launcher,
        table,
        torch.from_numpy(slots),
        logits if isinstance(logits, torch.Tensor) else torch.from_numpy(logits),
        vocab_size,
        *(torch.from_numpy(array) for array in (cu_logit_rows, num_tokens, num_drafts)),
        max_draft_len,
        result=AcceptResult(*(tensor[:-1] for tensor in memory)),
        verdicts=torch.full((num_rows, 3), 55, dtype=torch.int32),
        edited_logits=torch.full((num_rows, vocab_size), 55.0) if edits else None,
        workspace=space,
        stages=stages,
        part_entries=part_entries,
    )
    assert all((tensor[-1] == 77).all() for tensor in memory), "written behind the last request"
    return AcceptResult(*(tensor[:-1].numpy() for tensor in memory))


def int32(*values):
    return np.array(values, np.int32)


def one_row(launcher, logits, *, tokens=(0,), drafts=(), q=None, dtype=None, certain=False, options=None, **fields):
    """(token, accepted, outcome, status) of one request with one row. certain: its drafts were not drawn; options: of
    run()."""
    vocab_size, num_tokens = len(logits), len(tokens)
    slots = Slots(1, vocab_size, 2)
    slots.set(0, tokens=[*tokens, *drafts], **{"mode": native.GREEDY, **fields})
    slots.draft_sources[0, num_tokens:] = native.BY_SUFFIX if certain else native.BY_MODEL
    if q is not None:
        slots.draft_probs[0, num_tokens % 2] = q
    rows = np.array([logits], np.float32)
    rows = rows if dtype is None else torch.from_numpy(rows).to(dtype)
    batch = (slots.array, int32(0), rows, vocab_size, int32(0, 1), int32(num_tokens), int32(len(drafts)), 2)
    found = run(launcher, *batch, **(options or {}))
    return found.token_ids[0, 0], found.num_accepted[0], found.outcome[0], found.row_status[0]


@st.composite
def parameters(draw, vocab_size, num_mask_rows):
    """Fields of Slots.set: a mode, filters, and edits of logits."""
    token = st.integers(0, vocab_size - 1)
    fields = {
        "mode": draw(st.sampled_from(MODES)),
        "key": draw(st.integers(0, 2**64 - 1)),
        "temperature": draw(st.sampled_from([0.3, 1.0, 3.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 3, 50, 1000])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.8, 0.3, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.1])),
    }
    if draw(st.booleans()):
        fields |= {
            "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.5])),
            "frequency_penalty": draw(st.sampled_from([0.0, -0.3])),
            "bias": draw(st.lists(st.tuples(token, st.sampled_from([-50.0, 2.5])), max_size=3)),
            "bad_words": draw(st.lists(st.lists(token, min_size=1, max_size=2), max_size=3)),
            "end_ids": draw(st.lists(token, max_size=2)),
            "min_tokens": draw(st.sampled_from([0, 3])),
        }
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        fields["masks"] = rng.random((num_mask_rows, vocab_size)) < draw(st.sampled_from([0.1, 0.7, 1.0]))
    return fields


@st.composite
def rounds(draw):
    """A batch: per request a mode, edits, committed tokens, pending drafts, and drafts to verify."""
    max_draft_len = draw(st.integers(0, 4))
    vocab_size = draw(st.sampled_from([1, 2, 5, 33, 200, 700]))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        num_drafts = draw(st.integers(0, max_draft_len))
        fields = draw(parameters(vocab_size, max_draft_len + 1))
        requests.append((fields, draw(st.integers(1, 9)), num_drafts, draw(st.integers(-1, num_drafts))))
    ties = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    return max_draft_len, vocab_size, requests, ties, dtype, draw(st.integers(0, 2**32))


def run_every_mode(launcher, seed, n=24, vocab_size=300, **options):
    """run of a batch in which every mode meets every filter and edit, with ties, a NaN, a test that leaves no residual,
    and drafts of the text."""
    rng = np.random.default_rng(seed)
    slots = Slots(n, vocab_size, 1)
    slots.draft_probs[:] = rng.dirichlet(np.ones(vocab_size), (n, 1))
    slots.draft_probs[8] = 5
    edits = {"frequency_penalty": 0.2, "bias": [(7, 1.0), (3, 2.0)], "bad_words": [[3], [5, 6], [9]]}
    edits |= {"end_ids": [11], "min_tokens": 20, "masks": np.arange(vocab_size)[None] % 9 != 0}
    for slot in range(n):
        fields = {"top_k": 100 * (slot % 3 == 0), "top_p": 0.9 if slot % 2 else 1.0, "temperature": 4.0}
        fields |= edits if slot % 5 == 0 else {}
        fields |= {"top_k": vocab_size - 1} if slot == 20 else {}  # more than its mask leaves
        fields |= {"min_p": 0.01} if slot > 8 and slot % 6 == 5 else {}  # with top_p: one block does the whole row
        fields |= {"temperature": 1e-31} if slot == 4 else {}  # no time of its race can be estimated
        slots.set(slot, tokens=rng.integers(0, vocab_size, 9), mode=MODES[slot % 3], key=slot, **fields)
    slots.draft_sources[11:18] = native.BY_SUFFIX
    logits = np.round(rng.standard_normal((n, vocab_size)) * 2).astype(np.float32)
    logits[[5, 7], 100] = np.nan
    ones, rows = np.ones(n, np.int32), np.arange(n + 1, dtype=np.int32)
    return run(launcher, slots.array, rows[:-1], logits, vocab_size, rows, 8 * ones, ones, 1, **options)
