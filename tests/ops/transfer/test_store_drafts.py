"""Drafts of a device in the memory of their requests, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.transfer.store_drafts import DraftStore
from lab.reference.transfer.store_drafts import store_drafts_reference
from tests.support.sampling_slots import Slots

NUM_SLOTS, CAPACITY, MAX_STEPS, STRIDE = 4, 20, 5, 6
OPTIONAL = ("draft_margins", "draft_candidates", "draft_runners_up", "draft_sources")


class Memory(Slots):
    """Slots with all that drafting can write."""

    def __init__(self, modes, missing) -> None:
        super().__init__(NUM_SLOTS, 100, MAX_STEPS, CAPACITY)
        self.draft_sources[:] = native.BY_SUFFIX
        self.draft_margins = np.zeros((NUM_SLOTS, CAPACITY), np.float32)
        self.draft_candidates = np.zeros((NUM_SLOTS, CAPACITY, NUM_CANDIDATES), np.int32)
        self.draft_runners_up = np.zeros((NUM_SLOTS, CAPACITY), np.int32)
        for slot in range(NUM_SLOTS):
            addresses = {name: 0 if name in missing else getattr(self, name)[slot].ctypes.data for name in OPTIONAL}
            self.set(slot, mode=modes[slot], draft_counter=10 * slot, **addresses)

    def contents(self):
        return [getattr(self, name).tolist() for name in ("tokens", *OPTIONAL)] + [self.array["draft_counter"].tolist()]


@given(data=st.data(), seed=st.integers(0, 99))
def test_memory_is_the_references(data, seed) -> None:
    random = np.random.default_rng(seed)
    modes = [data.draw(st.sampled_from((native.GREEDY, native.SEEDED, native.SAMPLED))) for _ in range(NUM_SLOTS)]
    missing = data.draw(st.sets(st.sampled_from(OPTIONAL)))
    order = data.draw(st.permutations(range(NUM_SLOTS)))[: data.draw(st.integers(1, NUM_SLOTS))]
    known = random.integers(1, CAPACITY - MAX_STEPS, len(order))
    num_steps = data.draw(st.integers(0, MAX_STEPS))
    tokens = random.integers(0, 100, (num_steps, STRIDE)).astype(np.int32)
    for i in range(STRIDE):
        tokens[data.draw(st.integers(0, num_steps)) :, i] = -1
    margins = random.random((num_steps, STRIDE)).astype(np.float32)
    candidates = random.integers(0, 100, (num_steps, STRIDE, NUM_CANDIDATES)).astype(np.int32)
    runners_up = random.integers(-1, 100, tokens.shape).astype(np.int32) if data.draw(st.booleans()) else None
    arguments = (np.array(order, np.int32), known.astype(np.int32), tokens, margins, candidates, runners_up)
    found, wanted = Memory(modes, missing), Memory(modes, missing)
    counts = DraftStore(NUM_SLOTS).store(found.array, *arguments)
    assert counts.tolist() == store_drafts_reference(wanted.array, *arguments).tolist()
    assert found.contents() == wanted.contents()


def test_by_hand() -> None:
    memory = Memory([native.SAMPLED] * NUM_SLOTS, ())
    tokens = np.array([[5, 6], [7, -1]], np.int32)
    candidates = np.arange(2 * 2 * NUM_CANDIDATES, dtype=np.int32).reshape(2, 2, NUM_CANDIDATES)
    margins = np.array([[0.5, 1.5], [2.5, 3.5]], np.float32)
    counts = DraftStore(NUM_SLOTS).store(
        memory.array, np.array([2, 1], np.int32), np.array([3, 8], np.int32), tokens, margins, candidates, None
    )
    assert counts.tolist() == [2, 1]
    assert (memory.tokens[2, 3:6].tolist(), memory.tokens[1, 8:10].tolist()) == ([5, 7, 0], [6, 0])
    assert memory.draft_margins[2, 3:6].tolist() == [0.5, 2.5, 0]
    assert memory.draft_candidates[2, 4].tolist() == candidates[1, 0].tolist()
    assert memory.draft_sources[2, 2:6].tolist() == [1, 0, 0, 1]
    assert memory.draft_runners_up[2, 3:6].tolist() == [-1, -1, 0]
    assert memory.array["draft_counter"].tolist() == [0, 11, 22, 30]


def test_what_cannot_be_is_refused() -> None:
    memory = Memory([native.GREEDY] * NUM_SLOTS, ())
    steps = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32), np.zeros((2, 1, NUM_CANDIDATES), np.int32)
    slot, known = np.array([1], np.int32), np.array([3], np.int32)
    store = DraftStore(NUM_SLOTS)
    with pytest.raises(ValueError, match=r"margins \(1, 1\) and candidates"):
        store.store(memory.array, slot, known, steps[0], steps[1][:1], steps[2], None)
    with pytest.raises(InvalidArgumentError, match="storing the drafts of 2 requests failed"):
        store.store(memory.array, np.array([1, 2], np.int32), np.array([3, 3], np.int32), *steps, None)
    with pytest.raises(InvalidArgumentError, match="storing the drafts of 1 requests failed"):
        store.store(memory.array, slot, np.zeros(1, np.int32), *steps, None)
    memory.array[1]["tokens"] = 0
    with pytest.raises(InvalidArgumentError, match="storing the drafts of 1 requests failed"):
        store.store(memory.array, slot, known, *steps, None)
