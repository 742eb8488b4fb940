"""faser_draft over a real engine: what single passes and single draws would give, in one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.sampling.table import SamplingTable
from lab.reference.sample import sample_draft_reference

VOCAB_SIZE, MAX_DRAFT_LEN, NUM_SLOTS = 100, 4, 5


@dataclass
class Case:
    """One request's part: its parameters, committed and pending tokens, draft KV it has, drafts it wants."""

    params: dict
    num_tokens: int
    num_drafts: int
    num_computed: int
    num_new: int


CASES = [
    Case({}, 11, 0, 0, 4),
    Case({"temperature": 0.9, "seed": 7}, 5, 1, 4, 3),
    Case({"temperature": 1.3, "top_k": 20}, 9, 2, 7, 2),
    Case({"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3}, 20, 0, 13, 1),
    Case({"temperature": 1.0}, 6, 0, 2, 0),  # catches up, drafts nothing
]


class Bound:
    """The cases bound to slots in reverse order, with the same tokens and keys each time."""

    def __init__(self, cases=CASES) -> None:
        self.cases = cases
        keys = iter(range(1, 100))
        self.table = SamplingTable(NUM_SLOTS, VOCAB_SIZE, MAX_DRAFT_LEN, new_key=lambda: next(keys))
        self.slots = list(range(len(cases)))[::-1]
        self.requests = []
        for slot, case in zip(self.slots, cases, strict=True):
            tokens = np.random.default_rng(slot).integers(0, VOCAB_SIZE, case.num_tokens + case.num_drafts)
            params = SamplingParams(max_tokens=20, **case.params)
            sizes = {"max_seq_len": 64, "max_draft_len": MAX_DRAFT_LEN}
            request = Request(str(slot), tokens[: case.num_tokens], params, **sizes)
            request.tokens[: tokens.size] = tokens
            self.table.bind(slot, request)
            self.requests.append(request)

    def numbers(self, name):
        return np.array([getattr(case, name) for case in self.cases], np.int32)

    def catch_up(self, harness):
        """Give the draft KV that the cases say is there."""
        rows = [
            (slot, request.tokens, 0, case.num_computed)
            for slot, request, case in zip(self.slots, self.requests, self.cases, strict=True)
            if case.num_computed
        ]
        harness.run(rows)

    def draft(self, harness, **changed):
        rows = [
            (slot, request.tokens, case.num_computed, case.num_tokens + case.num_drafts)
            for slot, request, case in zip(self.slots, self.requests, self.cases, strict=True)
        ]
        counts = {name: self.numbers(name) for name in ("num_tokens", "num_drafts", "num_new")} | changed
        draft_batch = DraftBatch(harness.batch(rows), self.table.array, *counts.values(), MAX_DRAFT_LEN)
        return harness.engine.draft(draft_batch).tolist()


def test_one_call_is_many_single_steps(harness):
    drafted = Bound()
    drafted.catch_up(harness)
    assert drafted.draft(harness) == [case.num_new for case in CASES]

    expected = Bound()
    for slot, request, case in zip(expected.slots, expected.requests, CASES, strict=True):
        for known in range(case.num_tokens + case.num_drafts, case.num_tokens + case.num_drafts + case.num_new):
            logits = harness.run([(slot, request.tokens, 0, known)])[0][-1:]
            slots, num_known = np.array([slot], np.int32), np.array([known], np.int32)
            sample_draft_reference(expected.table.array, slots, logits, VOCAB_SIZE, num_known, MAX_DRAFT_LEN)

    for one, other in zip(drafted.requests, expected.requests, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert (drafted.table.array["draft_counter"] == expected.table.array["draft_counter"]).all()
    for slot in range(NUM_SLOTS):
        np.testing.assert_allclose(
            drafted.table.draft_probs.rows(slot), expected.table.draft_probs.rows(slot), rtol=1e-5, atol=1e-9
        )


def test_drafting_goes_on_behind_pending_drafts(harness):
    """Two calls of two tokens are one call of four: the second runs the row that the first left without KV."""
    once = Bound([Case({"temperature": 1.0, "seed": 3}, 8, 0, 0, 4)])
    assert once.draft(harness) == [4]
    twice = Bound([Case({"temperature": 1.0, "seed": 3}, 8, 0, 0, 2)])
    assert twice.draft(harness) == [2]
    twice.cases = [Case({}, 8, 2, 9, 2)]
    assert twice.draft(harness) == [2]
    assert twice.requests[0].tokens.tolist() == once.requests[0].tokens.tolist()


def test_an_empty_distribution_ends_a_request_s_drafting(harness):
    every_token = tuple((token,) for token in range(VOCAB_SIZE))
    bound = Bound([Case({"bad_words": every_token}, 8, 0, 0, 3), Case({}, 8, 0, 0, 3)])
    before = bound.requests[0].tokens.tolist()
    assert bound.draft(harness) == [0, 3]
    assert bound.requests[0].tokens.tolist() == before


def test_more_drafts_than_their_memory_holds_are_refused(harness):
    bound = Bound([Case({"temperature": 1.0}, 8, 2, 0, 3)])
    with pytest.raises(InvalidArgumentError):
        bound.draft(harness)


def test_a_slot_that_was_released_is_refused(harness):
    bound = Bound([Case({}, 8, 0, 0, 2)])
    bound.table.release(bound.slots[0])
    with pytest.raises(InvalidArgumentError):
        bound.draft(harness)


def test_rows_that_do_not_reach_the_last_known_token_are_refused(harness):
    bound = Bound([Case({}, 8, 0, 0, 2)])
    with pytest.raises(InvalidArgumentError):
        bound.draft(harness, num_tokens=np.array([9], np.int32))
