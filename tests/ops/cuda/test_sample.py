"""The kernels that draw draft tokens, run on the CPU as they are, against the native library's draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda import sample as op
from tests.ops.cuda.accept_batches import MODES, SmallBlocks, parameters
from tests.support.effort import examples
from tests.support.sampling_slots import Slots

MAX_REQUESTS = 7
WIDTH = 5


class Case:
    """A draft call of some requests: entries with a history each, what the steps write, and a rule that ends it."""

    def __init__(self, fields, vocab_size: int, max_draft_len: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n, self.vocab_size, self.max_draft_len = len(fields), vocab_size, max_draft_len
        self.slots = Slots(MAX_REQUESTS, vocab_size, max_draft_len)
        known = rng.integers(1, 9, MAX_REQUESTS)
        for slot, each in enumerate(fields):
            tokens = rng.integers(0, vocab_size, known[slot])
            counter = rng.integers(0, 2**40)
            self.slots.set(slot, tokens=tokens, prompt_len=1, draft_counter=counter, **each)
        entries = self.slots.array.view(np.uint8).reshape(-1, SAMPLING_DTYPE.itemsize)
        shape = (max_draft_len, MAX_REQUESTS)
        self.draws = op.Draws(
            torch.from_numpy(entries),
            torch.from_numpy(known.astype(np.int32)),
            torch.from_numpy(rng.integers(0, max_draft_len + 1, MAX_REQUESTS).astype(np.int32)),
            torch.from_numpy(rng.permutation(MAX_REQUESTS).astype(np.int32)),
            torch.full((MAX_REQUESTS,), 77, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.full(shape, 77, dtype=torch.int32),
            torch.full(shape, 77.0),
            torch.full((*shape, NUM_CANDIDATES), 77, dtype=torch.int32),
            torch.full((MAX_REQUESTS, max_draft_len, vocab_size), 77.0),
        )
        tables = torch.from_numpy(rng.standard_normal((3, 3, WIDTH)).astype(np.float32))
        tables[2] = tables[2].abs()
        self.stop = op.StopTables(
            torch.from_numpy(self.slots.array["mode"].astype(np.int32)),
            tables,
            torch.from_numpy(rng.uniform(0, 0.1, WIDTH).astype(np.float32)),
            torch.from_numpy(rng.uniform(0, 0.3, MAX_REQUESTS + 1).astype(np.float32)),
            torch.from_numpy(rng.integers(0, 3, MAX_REQUESTS).astype(np.int32)),
            torch.ones(MAX_REQUESTS, dtype=torch.float64),
            torch.full((1,), 77, dtype=torch.int32),
        )
        logits = rng.standard_normal((max_draft_len, MAX_REQUESTS, vocab_size)).astype(np.float32) * 2
        logits = np.round(logits) if seed % 2 else logits  # ties
        logits[rng.random(logits.shape) < 0.05] = -np.inf
        logits[rng.random(logits.shape[:2]) < 0.05, 0] = np.nan
        logits[rng.random(logits.shape[:2]) < 0.05] = -np.inf
        self.logits = torch.from_numpy(logits)

    def run(self, launcher) -> Case:
        """All steps; launcher None: by the references."""
        for step in range(self.max_draft_len):
            logits = self.logits[step]
            scratch = torch.full((MAX_REQUESTS, self.vocab_size), 55.0)
            if launcher is None:
                op.sample_reference(self.draws, logits, self.n, scratch)
                op.advance_reference(self.draws, self.stop, self.n, has_history=True)
            else:
                op.sample(launcher, self.draws, logits, self.n, scratch)
                op.advance(launcher, self.draws, self.stop, self.n, has_history=True)
        return self


def assert_same(found: Case, wanted: Case) -> None:
    """Seeded margins and survival up to the last bits of two logarithms, all else to the bit."""
    for name in ("known", "remaining", "newest", "step", "tokens", "candidates", "probs"):
        assert torch.equal(getattr(found.draws, name), getattr(wanted.draws, name)), name
    np.testing.assert_array_equal(found.slots.tokens, wanted.slots.tokens)
    torch.testing.assert_close(found.draws.margins, wanted.draws.margins, rtol=1e-5, atol=1e-9)
    is_seeded = wanted.stop.modes == native.SEEDED
    assert torch.equal(found.draws.margins[:, ~is_seeded], wanted.draws.margins[:, ~is_seeded])
    for name in ("pending", "num_going"):
        assert torch.equal(getattr(found.stop, name), getattr(wanted.stop, name)), name
    torch.testing.assert_close(found.stop.survival, wanted.stop.survival, rtol=1e-5, atol=1e-12)


@settings(max_examples=examples(100), derandomize=True)
@given(st.data())
def test_the_kernels_are_the_reference(data) -> None:
    """All modes, filters and edits, over steps that count each other's tokens; idle requests, and rows that fail."""
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 33, 200, 700]))
    max_draft_len = data.draw(st.integers(1, 4))
    fields = data.draw(st.lists(parameters(vocab_size, 64), min_size=1, max_size=MAX_REQUESTS))
    seed = data.draw(st.integers(0, 2**32))
    found, wanted = (Case(fields, vocab_size, max_draft_len, seed) for _ in range(2))
    assert_same(found.run(SmallBlocks(stem="sample")), wanted.run(None))


FIELDS = [
    {"mode": MODES[i % 3], "key": i, "temperature": 0.7, "top_k": (0, 40)[i % 2], "top_p": (1.0, 0.8)[i // 3 % 2]}
    for i in range(MAX_REQUESTS)
]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_order_of_threads_does_not_matter(order: int) -> None:
    ascending, other = (Case(FIELDS, 300, 3, 4).run(SmallBlocks(o, "sample")) for o in (0, order))
    assert_same(other, ascending)


def test_a_row_does_not_depend_on_the_batch() -> None:
    whole, alone = Case(FIELDS, 300, 1, 4), Case(FIELDS, 300, 1, 4)
    whole.run(SmallBlocks(stem="sample"))
    for request in range(1, MAX_REQUESTS):
        alone.draws.remaining[:request] = 0
        alone.draws.step[0] = 0
        op.sample(SmallBlocks(stem="sample"), alone.draws, alone.logits[0], request + 1)
        for name in ("tokens", "margins", "candidates"):
            assert torch.equal(getattr(alone.draws, name)[0, request], getattr(whole.draws, name)[0, request]), name


def test_numbers_that_would_index_memory_wrongly_draw_nothing() -> None:
    case = Case(FIELDS, 50, 2, 1)
    case.draws.remaining[:] = 2
    case.draws.known[:3] = torch.tensor([0, -5, 2**31 - 1])
    case.draws.slots[3:] = torch.tensor([-1, MAX_REQUESTS, 2**31 - 1, -(2**31)])  # only unseeded requests need theirs
    case.slots.array["tokens"][4] = 0
    op.sample(SmallBlocks(stem="sample"), case.draws, case.logits[0].nan_to_num(), case.n)
    assert [token >= 0 for token in case.draws.tokens[0].tolist()] == [False] * 3 + [True, False, False, True]
    assert (case.draws.probs == 77).all()
    before = case.draws.tokens.clone()
    for step in (-1, 2, 2**31 - 1):
        case.draws.step[0], case.stop.num_going[0] = step, 5
        op.sample(SmallBlocks(stem="sample"), case.draws, case.logits[0], case.n)
        op.advance(SmallBlocks(stem="sample"), case.draws, case.stop, case.n)
        assert torch.equal(case.draws.tokens, before)
        assert case.stop.num_going[0] == 0, "whatever repeats this would not end"
        assert case.draws.step[0] == step


def test_edits_without_scratch_draw_nothing() -> None:
    case = Case([{"mode": native.GREEDY, "bias": [(1, 2.0)]}, {"mode": native.GREEDY}], 50, 1, 0)
    case.draws.remaining[:] = 1
    op.sample(SmallBlocks(stem="sample"), case.draws, case.logits[0], 2)
    assert case.draws.tokens[0, 0] == -1
    assert case.draws.tokens[0, 1] == case.logits[0, 1].argmax()


def test_wrong_tensors_are_refused() -> None:
    case = Case(FIELDS, 50, 2, 1)
    for logits, scratch, message in (
        (case.logits[0, :2], None, "logits has 2 rows, it must have 7"),
        (case.logits[0, :, :40].contiguous(), None, r"logits has shape \(7, 40\)"),
        (case.logits[0].half(), None, r"logits has dtype torch\.float16"),
        (case.logits[0], case.logits[0, :2], "edited_logits has 2 rows, it must have 7"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            op.sample(None, case.draws, logits, case.n, scratch)  # type: ignore[arg-type]
