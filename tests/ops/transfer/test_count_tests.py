"""Counts of drafts that a device tested, against the reference and against the native test's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.accept import accept
from faser_trtllm.ops.transfer.count_tests import count_tests
from lab.reference.transfer.count_tests import count_tests_reference
from tests.support.sampling_slots import Slots

NUM_SLOTS, CAPACITY, VOCAB_SIZE, MAX_DRAFT_LEN = 3, 16, 4, 4
COUNTS = ("num_tested", "num_passed")


def slots_of(seed: int) -> Slots:
    random = np.random.default_rng(seed)
    slots = Slots(NUM_SLOTS, VOCAB_SIZE, MAX_DRAFT_LEN, CAPACITY)
    slots.tokens[:] = random.integers(0, VOCAB_SIZE, slots.tokens.shape)
    slots.draft_sources[:] = random.integers(0, 2, slots.draft_sources.shape)
    for slot in range(NUM_SLOTS):
        sources = {} if random.random() < 0.7 else {"draft_sources": 0}
        slots.set(slot, mode=native.GREEDY, num_tested=(3, slot), num_passed=(1, slot), **sources)
    return slots


@given(seed=st.integers(0, 999))
def test_counts_are_those_of_the_native_test_and_of_the_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    order = random.permutation(NUM_SLOTS)[: random.integers(1, NUM_SLOTS + 1)].astype(np.int32)
    known = random.integers(1, CAPACITY - MAX_DRAFT_LEN, order.size).astype(np.int32)
    pending = random.integers(0, MAX_DRAFT_LEN + 1, order.size).astype(np.int32)
    rows = np.array([random.integers(1, 2 + count) for count in pending])
    cu_rows = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    logits = random.integers(0, 2, (int(rows.sum()), VOCAB_SIZE)).astype(np.float32)
    tested, counted, by_reference = (slots_of(seed) for _ in range(3))
    found = accept(tested.array, order, logits, VOCAB_SIZE, cu_rows, known, pending, MAX_DRAFT_LEN)
    count_tests(counted.array, order, known, found.num_accepted, found.outcome)
    count_tests_reference(by_reference.array, order, known, found.num_accepted, found.outcome)
    for name in COUNTS:
        wanted = tested.array[name].tolist()
        assert (counted.array[name].tolist(), by_reference.array[name].tolist()) == (wanted, wanted)


def test_what_cannot_be_is_refused() -> None:
    one = [np.array([value], np.int32) for value in (0, 3, -1, native.BONUS)]
    with pytest.raises(InvalidArgumentError, match="counting tested drafts failed"):
        count_tests(slots_of(0).array, *one)
