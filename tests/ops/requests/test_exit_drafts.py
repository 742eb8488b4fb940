"""Tests of the candidates, places and log-odds of drafts that boundaries ask for, against the references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.acceptance import MAX_LOG_ODDS, AcceptanceModel
from faser_trtllm.ops.requests.exit_drafts import exit_drafts
from lab.reference.acceptance import log_odds_reference
from lab.reference.requests.exit_drafts import exit_drafts_reference
from tests.support.columns import columns
from tests.support.sampling_slots import Slots

NUM_SLOTS, CAPACITY, MAX_DRAFT_LEN = 4, 20, 5


class Drafted(Slots):
    def __init__(self, seed: int) -> None:
        super().__init__(NUM_SLOTS, 12, MAX_DRAFT_LEN, CAPACITY)
        random = np.random.default_rng(seed)
        self.tokens[:] = random.integers(0, 12, self.tokens.shape)
        self.draft_sources[:] = random.integers(0, 2, self.draft_sources.shape)
        self.margins = random.normal(0, 15, (NUM_SLOTS, CAPACITY)).astype(np.float32)
        self.candidates = random.integers(-1, 12, (NUM_SLOTS, CAPACITY, NUM_CANDIDATES)).astype(np.int32)
        for slot in range(NUM_SLOTS):
            self.set(
                slot,
                mode=int(random.integers(0, 3)),
                draft_margins=self.margins[slot].ctypes.data,
                draft_candidates=self.candidates[slot].ctypes.data,
                **({} if random.random() < 0.7 else {"draft_sources": 0}),
            )


@st.composite
def drafts(draw):
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(0, NUM_SLOTS))]
    known = [draw(st.integers(1, CAPACITY - MAX_DRAFT_LEN)) for _ in slots]
    return columns(slots, known, [draw(st.integers(0, MAX_DRAFT_LEN)) for _ in slots])


@given(drafted=drafts(), seed=st.integers(0, 99))
def test_candidates_places_and_log_odds_are_the_references(drafted, seed) -> None:
    slots, model = Drafted(seed), AcceptanceModel(MAX_DRAFT_LEN)
    random = np.random.default_rng(seed)
    model.slope[:], model.intercept[:] = random.normal(0, 2, (2, *model.slope.shape))
    for found, wanted in zip(
        exit_drafts(slots.array, *drafted), exit_drafts_reference(slots.array, *drafted), strict=True
    ):
        assert (found.dtype, found.shape, found.tolist()) == (np.int32, wanted.shape, wanted.tolist())
    odds = model.log_odds(slots.array, *drafted)
    wanted_odds = log_odds_reference(model, slots.array, *drafted)
    assert (odds.dtype, odds.tolist()) == (np.float32, wanted_odds.tolist())


def test_by_hand() -> None:
    slots, model = Drafted(0), AcceptanceModel(MAX_DRAFT_LEN)
    slots.set(
        1,
        mode=native.GREEDY,
        draft_margins=slots.margins[1].ctypes.data,
        draft_candidates=slots.candidates[1].ctypes.data,
    )
    slots.candidates[1, 6:9] = np.arange(NUM_CANDIDATES)
    slots.tokens[1, 6:9] = 3, 0, 11
    slots.draft_sources[1, 6:9] = native.BY_MODEL, native.BY_SUFFIX, native.BY_MODEL
    slots.margins[1, 6:9] = 2.0, 1.5, -1e4
    model.slope[native.GREEDY, :3], model.intercept[native.GREEDY, :3] = (0.5, 9.0, 1.0), (0.25, 9.0, 0.0)
    candidates, places = exit_drafts(slots.array, *columns([1], [6], [3]))
    assert (candidates.tolist(), places.tolist()) == ([list(range(NUM_CANDIDATES))] * 3, [3, 0, 0])
    assert model.log_odds(slots.array, *columns([1], [6], [3])).tolist() == [1.25, 1.5, np.float32(-MAX_LOG_ODDS)]


def test_what_cannot_be_is_refused() -> None:
    slots, model = Drafted(0), AcceptanceModel(2)
    with pytest.raises(InvalidArgumentError, match="reading the margins of 1 requests failed"):
        model.log_odds(slots.array, *columns([1], [6], [3]))
    slots.array[1]["draft_margins"] = slots.array[1]["draft_candidates"] = 0
    with pytest.raises(InvalidArgumentError, match="reading the margins of 1 requests failed"):
        model.log_odds(slots.array, *columns([1], [6], [1]))
    with pytest.raises(InvalidArgumentError, match="reading the candidates of 1 requests failed"):
        exit_drafts(slots.array, *columns([1], [6], [1]))
    assert (
        exit_drafts(slots.array, *columns([1], [6], [0]))[1].size
        == model.log_odds(slots.array, *columns([1], [6], [0])).size
        == 0
    )
