"""Which tokens get a row beside the drafts: native against the reference, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.requests.pick_branches import PRIOR, BranchPicker, prior_acceptance
from lab.reference.requests.pick_branches import pick_branches_reference
from tests.support.columns import columns
from tests.support.effort import examples
from tests.support.sampling_slots import Slots

CAPACITY = 64


class Drafted(Slots):
    """Slots with drafts behind their tokens."""

    def __init__(self, num_slots):
        self.margins = np.zeros((num_slots, CAPACITY), np.float32)
        self.runners_up = np.full((num_slots, CAPACITY), -1, np.int32)
        super().__init__(num_slots, 8, 8, CAPACITY)

    def set(self, slot, **fields):
        arrays = {
            "draft_margins": self.margins,
            "draft_runners_up": self.runners_up,
            "draft_sources": self.draft_sources,
        }
        super().set(slot, **{name: array[slot].ctypes.data for name, array in arrays.items()} | fields)


def drafted(margins, runners_up, num_tokens=3):
    slots = Drafted(1)
    slots.set(0, mode=native.GREEDY)
    slots.margins[0, num_tokens : num_tokens + len(margins)] = margins
    slots.runners_up[0, num_tokens : num_tokens + len(margins)] = runners_up
    return slots


def as_log_odds():
    """An estimate that takes margins for log-odds."""
    model = AcceptanceModel(8)
    model.slope[:] = 1.0
    return model


def test_the_most_doubtful_places_that_are_reached():
    """At even odds the first draft fails half the time, the second a quarter of the time; a sure one never does."""
    slots = drafted([0.0, 0.0, 12.0, -1.0], [5, 6, 7, 4])

    def pick(max_branches, min_worth=0.0, verified=4, room=9):
        counts = columns([0], [3], [4], [verified])
        _, *found = BranchPicker(max_branches, 9).pick(slots.array, *counts, as_log_odds(), min_worth, room).tolist()
        assert counts[-1] == verified  # branches come on top
        return tuple(found)

    assert pick(1) == ([0], [5])
    assert pick(3) == ([0, 1, 3], [5, 6, 4])
    assert pick(3, min_worth=0.2) == ([0], [5])  # 0.6 / 2, and 0.6 / 4 for the second
    assert pick(3, verified=0) == ([0], [5])  # the first row alone runs, and tests the first draft
    assert pick(3, room=2) == ([0, 1], [5, 6])
    assert pick(0) == pick(3, room=0) == ([], [])


def test_a_branch_takes_the_row_of_a_draft_that_is_less_likely_reached():
    """The rows of the drafts are reached with 1/2, 1/4, 1/8 and 1/16; the branches are worth 0.6 of that."""
    slots = drafted([0.0] * 4, [5, 6, 7, 4])

    def trade(max_branches, verified=4, room=9):
        counts = columns([0], [3], [4], [verified])
        _, places, _ = BranchPicker(max_branches, 9).pick(slots.array, *counts, as_log_odds(), None, room).tolist()
        assert len(places) + counts[-1] == verified  # as many rows as there were
        return places

    assert trade(1) == [0]  # 0.3 for 1/16
    assert trade(4) == [0, 1]  # 0.15 for 1/8, and not 0.075 for 1/4
    assert trade(4, room=1) == [0]
    assert trade(4, verified=2) == [0]
    assert trade(4, verified=1) == []  # 0.3 is less than 1/2
    assert trade(4, verified=0) == trade(0) == []


def test_sure_drafts_keep_their_rows():
    slots = drafted([12.0] * 4, [5, 6, 7, 4])
    counts = columns([0], [3], [4], [4])
    assert not BranchPicker(4, 4).pick(slots.array, *counts, prior_acceptance(4), None, 4).size
    assert counts[-1] == 4


def test_without_an_estimate_a_mode_has_its_prior():
    model = prior_acceptance(5)
    assert [model.at(mode, 4, 0.0) for mode in range(3)] == [
        pytest.approx(1 / (1 + np.exp(-intercept))) for _, intercept in PRIOR
    ]
    assert all(model.at(mode, 0, 20.0) > 0.99 for mode in range(3))


def test_what_the_text_itself_said_has_no_runner_up():
    slots = drafted([0.0, 0.0], [5, 6])
    slots.draft_sources[0, 3] = native.BY_SUFFIX
    found = BranchPicker(2, 4).pick(slots.array, *columns([0], [3], [2], [2]), as_log_odds(), 0.0, 4)
    assert found.tolist() == [[0], [1], [6]]


def test_native_is_the_reference():
    found = traded = 0
    for seed in range(examples(200)):
        rng = np.random.default_rng(seed)
        n, most, room = int(rng.integers(0, 6)), int(rng.integers(0, 4)), int(rng.integers(0, 9))
        slots = Drafted(n + 1)
        order = rng.permutation(n + 1)[:n].tolist()
        for slot in order:
            slots.set(slot, mode=int(rng.integers(0, 3)))
        slots.margins[:] = rng.choice([0.0, 0.5, 3.0, 40.0], slots.margins.shape)
        slots.runners_up[:] = rng.integers(-1, 8, slots.runners_up.shape)
        slots.draft_sources[:] = rng.integers(0, 2, slots.draft_sources.shape)
        model = AcceptanceModel(8)
        model.slope[:], model.intercept[:] = rng.random(model.slope.shape), rng.normal(size=model.slope.shape)
        tokens, pending = rng.integers(1, 20, n).tolist(), rng.integers(0, 9, n).tolist()
        verified = [int(rng.integers(0, count + 1)) for count in pending]
        min_worth = [None, 0.0, 0.02, 0.2][rng.integers(4)]
        counts, others = (columns(order, tokens, pending, verified) for _ in range(2))
        wanted = pick_branches_reference(slots.array, *counts, model, min_worth, most, min(8, room))
        picked = BranchPicker(most, 8).pick(slots.array, *others, model, min_worth, room)
        assert picked.tolist() == wanted.tolist()
        assert others[-1].tolist() == counts[-1].tolist()
        found += wanted.shape[1]
        traded += sum(verified) - sum(counts[-1].tolist())
    assert found > traded > 0


def test_slots_without_what_is_read_are_refused():
    slots = Drafted(1)
    slots.set(0, draft_runners_up=0)
    with pytest.raises(InvalidArgumentError):
        BranchPicker(1, 1).pick(slots.array, *columns([0], [3], [2], [2]), as_log_odds(), 0.0, 1)


def test_more_rows_than_drafts_are_refused():
    with pytest.raises(InvalidArgumentError):
        BranchPicker(1, 1).pick(drafted([0.0], [5]).array, *columns([0], [3], [1], [2]), as_log_odds(), None, 1)
