"""The kernels that draw draft tokens, run on the CPU as they are, against the native library's draws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import sample as op
from lab.reference.cuda.sample import advance_reference
from tests.ops.cuda.accept_batches import SmallBlocks, parameters
from tests.ops.cuda.sample_cases import FIELDS, MAX_REQUESTS, SampleCase, assert_same
from tests.support.effort import examples


@settings(max_examples=examples(100), derandomize=True)
@given(st.data())
def test_the_kernels_are_the_reference(data) -> None:
    """All modes, filters and edits, over steps that count each other's tokens; idle requests, and rows that fail."""
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 33, 200, 700]))
    max_draft_len = data.draw(st.integers(1, 4))
    fields = data.draw(st.lists(parameters(vocab_size, 64), min_size=1, max_size=MAX_REQUESTS))
    seed = data.draw(st.integers(0, 2**32))
    found, wanted = (SampleCase(fields, vocab_size, max_draft_len, seed) for _ in range(2))
    assert_same(found.run(SmallBlocks(stem="sample")), wanted.run(None))


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize(
    ("row_price", "worth"), [(0.125, 0.125), (0.25, 0.0625), (0.375, 0.0)], ids=["both pay", "one pays", "on the edge"]
)
def test_a_step_must_be_worth_its_price(row_price: float, worth: float, by_kernel: bool) -> None:
    """Reached with 1/2, the next draft is accepted with 1/4 or 3/4, so it brings 1/8 or 3/8 before its row."""
    for more, num_going in ((0.0, 1), (1e-6, 0)):
        case = SampleCase(FIELDS[:1], 50, 2, 1)
        case.draws.remaining[:], case.stop.pending[:] = 2, 0
        case.draws.tokens[:], case.draws.margins[:] = 3, 0.0
        case.stop.tables[:] = torch.tensor([1.0, 0.0, 0.5, 0.25])[:, None, None]
        case.stop.row_price[:], case.stop.step_price[:] = row_price, worth + more
        if by_kernel:
            op.advance(SmallBlocks(stem="sample"), case.draws, case.stop, 1)
        else:
            advance_reference(case.draws, case.stop, 1)
        assert case.stop.num_going.tolist() == [num_going]


def test_nobody_needs_to_ask_for_runners_up() -> None:
    asked, found = (SampleCase(FIELDS, 300, 3, 4) for _ in range(2))
    found.draws = dataclasses.replace(found.draws, runners_up=None)
    found.run(SmallBlocks(stem="sample"))
    asked.run(SmallBlocks(stem="sample"))
    for name in ("tokens", "margins", "candidates"):
        assert torch.equal(getattr(found.draws, name), getattr(asked.draws, name)), name


def test_a_row_does_not_depend_on_the_batch() -> None:
    whole, alone = SampleCase(FIELDS, 300, 1, 4), SampleCase(FIELDS, 300, 1, 4)
    whole.run(SmallBlocks(stem="sample"))
    for request in range(1, MAX_REQUESTS):
        alone.draws.remaining[:request] = 0
        alone.draws.step[0] = 0
        op.sample(SmallBlocks(stem="sample"), alone.draws, alone.logits[0], request + 1)
        for name in ("tokens", "margins", "candidates", "runners_up"):
            assert torch.equal(getattr(alone.draws, name)[0, request], getattr(whole.draws, name)[0, request]), name


def test_numbers_that_would_index_memory_wrongly_draw_nothing() -> None:
    case = SampleCase(FIELDS, 50, 2, 1)
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
    case = SampleCase([{"mode": native.GREEDY, "bias": [(1, 2.0)]}, {"mode": native.GREEDY}], 50, 1, 0)
    case.draws.remaining[:] = 1
    op.sample(SmallBlocks(stem="sample"), case.draws, case.logits[0], 2)
    assert case.draws.tokens[0, 0] == -1
    assert case.draws.tokens[0, 1] == case.logits[0, 1].argmax()


def test_wrong_tensors_are_refused() -> None:
    case = SampleCase(FIELDS, 50, 2, 1)
    for logits, scratch, message in (
        (case.logits[0, :2], None, "logits has 2 rows; it must have 7"),
        (case.logits[0, :, :40].contiguous(), None, r"logits has shape \[7, 40\]"),
        (case.logits[0].half(), None, r"logits has type fp16"),
        (case.logits[0], case.logits[0, :2], "edited_logits has 2 rows; it must have 7"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            op.sample(None, case.draws, logits, case.n, scratch)  # type: ignore[arg-type]
