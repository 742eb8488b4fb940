"""The distributions of what the accept kernels draw, on the CPU; and the kernels on a GPU, where there is one."""

import os
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from faser_trtllm import native
from faser_trtllm.native.structures import NUM_SOURCES
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.accept import accept, workspace_bytes
from lab.reference.accept import accept_reference
from lab.reference.sample import sample_draft_reference
from tests.ops.cuda.accept_batches import FIELDS, MODES, SmallBlocks, run
from tests.support.effort import pick
from tests.support.emission import KEY_STEP, check_toy_texts
from tests.support.sampling_slots import Slots
from tests.support.toy_models import VOCAB_SIZE, ToyModel


@pytest.mark.parametrize("certain_after", [(1, 2), *pick([], [(), range(VOCAB_SIZE)])])
@pytest.mark.parametrize("mode", [native.SEEDED, native.SAMPLED])
def test_the_text_has_the_target_s_distribution(mode, certain_after):
    check_toy_texts(1500, 2, mode, 2, num_drafts=2, accept=partial(run, SmallBlocks()), certain_after=certain_after)


def on_device(arrays, slots, device):
    """A sampling table on the device, with all that its pointers lead to; and what must stay alive with it."""
    table, kept = slots.array.copy(), []

    def move(array):
        kept.append(torch.from_numpy(np.ascontiguousarray(array)).to(device))
        return kept[-1].data_ptr()

    for slot, entry in enumerate(table):
        entry["tokens"] = move(slots.tokens[slot])
        entry["draft_sources"] = move(slots.draft_sources[slot])
        if entry["draft_probs"]:
            entry["draft_probs"] = move(slots.draft_probs[slot])
        for name, length in (("end_ids", "num_end_ids"), ("bias_ids", "num_bias"), ("bias_values", "num_bias")):
            if entry[length]:
                source = next(a for a in arrays if a.ctypes.data == entry[name])
                entry[name] = move(source)
        if entry["num_bad_words"]:
            for name in ("bad_words", "cu_bad_words"):
                entry[name] = move(next(a for a in arrays if a.ctypes.data == entry[name]))
    return torch.from_numpy(table.view(np.uint8).reshape(-1, SAMPLING_DTYPE.itemsize)).to(device), kept


def run_on(device, launcher, slots, slot_ids, logits, vocab_size, cu_rows, num_tokens, num_drafts, max_draft_len):
    """Run as run() does, with all memory on the device, and copy everything there back."""
    table, kept = on_device(slots._kept, slots, device)
    n = slot_ids.size
    shapes = [(n, max_draft_len + 1), *[(n,)] * 4]
    result = AcceptResult(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
    num_bytes = workspace_bytes(logits.shape[0], vocab_size)
    logits = torch.as_tensor(logits).to(device)
    tensors = [torch.from_numpy(array).to(device) for array in (slot_ids, cu_rows, num_tokens, num_drafts)]
    accept(
        launcher,
        table,
        tensors[0],
        logits,
        vocab_size,
        *tensors[1:],
        max_draft_len,
        result=result,
        verdicts=torch.empty((logits.shape[0], 3), dtype=torch.int32, device=device),
        edited_logits=torch.empty((logits.shape[0], vocab_size), device=device),
        workspace=torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=device),
    )
    found = AcceptResult(*(getattr(result, name).cpu().numpy() for name in FIELDS))
    del kept
    return found


def check_fresh_rows(device, launcher, vocab_size, dtype):
    """Random rows that are new every time; the seed is in the failure."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    n, max_draft_len = 12, 3
    slots = Slots(n, vocab_size, max_draft_len)
    slots.draft_probs[:] = rng.dirichlet(np.full(vocab_size, 0.5), (n, max_draft_len))
    slot_ids = rng.permutation(n).astype(np.int32)
    slots.draft_sources[:] = rng.integers(0, NUM_SOURCES, slots.draft_sources.shape)
    num_drafts = rng.integers(0, max_draft_len + 1, n).astype(np.int32)
    num_tokens = rng.integers(1, 30, n).astype(np.int32)
    for slot, known, drafts in zip(slot_ids.tolist(), num_tokens, num_drafts, strict=True):
        fields = {"top_k": int(rng.choice([0, 1, 50, 2000])), "top_p": float(rng.choice([1.0, 0.95, 0.5]))}
        if slot % 2 and vocab_size > 1:
            fields |= {"repetition_penalty": 1.2, "bias": [(0, 1.0), (0, -0.5)], "bad_words": [[0]]}
        tokens = rng.integers(0, vocab_size, known + drafts)
        slots.set(slot, tokens=tokens, mode=MODES[slot % 3], key=int(rng.integers(2**63)), **fields)
    cu_rows = np.cumsum([0, *(num_drafts + 1)]).astype(np.int32)
    logits = np.round(rng.standard_normal((cu_rows[-1] + 2, vocab_size)) * 3, 2).astype(np.float32)
    logits = torch.from_numpy(logits).to(dtype)
    rest = (vocab_size, cu_rows, num_tokens, num_drafts, max_draft_len)
    expected = accept_reference(slots.array, slot_ids, logits.float().numpy(), *rest)
    found = run_on(device, launcher, slots, slot_ids, logits, *rest)
    for name in FIELDS:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), (name, seed)


def check_distribution_of_one_token(device, launcher, mode, n):
    target, draft = ToyModel(11), ToyModel(12)
    slots = Slots(n, VOCAB_SIZE, 1)
    for slot in range(n):
        slots.set(slot, tokens=[0, 1], mode=mode, key=slot * KEY_STEP % 2**64)
    slot_ids, known = np.arange(n, dtype=np.int32), np.full(n, 2, np.int32)
    sample_draft_reference(slots.array, slot_ids, np.tile(draft.logits((0, 1)), (n, 1)), VOCAB_SIZE, known, 1)
    logits = np.tile(target.logits((0, 1)), (n, 1))
    rest = (VOCAB_SIZE, np.arange(n + 1, dtype=np.int32), known, np.ones(n, np.int32), 1)
    found = run_on(device, launcher, slots, slot_ids, logits, *rest)
    probs = target.probs((0, 1))
    counts = np.bincount(found.token_ids[:, 0], minlength=VOCAB_SIZE)
    assert counts[probs == 0].sum() == 0
    assert chisquare(counts[probs > 0], n * probs[probs > 0]).pvalue > 1e-3


def test_what_the_gpu_tests_do():
    """The tests below, on the CPU: they must not fail for reasons of their own."""
    for vocab_size, dtype in ((1, torch.float32), (33, torch.bfloat16), (1000, torch.float16)):
        check_fresh_rows("cpu", SmallBlocks(), vocab_size, dtype)
    for mode in (native.SEEDED, native.SAMPLED):
        check_distribution_of_one_token("cpu", SmallBlocks(), mode, 500)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture
    def module(self, on_gpu):
        return on_gpu("accept")

    @pytest.mark.parametrize("vocab_size", [1, 33, 1000, 32_000, 128_256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_kernels_are_the_reference(self, module, vocab_size, dtype):
        check_fresh_rows("cuda", module, vocab_size, dtype)

    @pytest.mark.parametrize("mode", [native.SEEDED, native.SAMPLED])
    def test_the_text_has_the_target_s_distribution(self, module, mode):
        check_distribution_of_one_token("cuda", module, mode, 20_000)
