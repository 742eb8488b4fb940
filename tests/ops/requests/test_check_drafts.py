"""Tests of native checks of what a drafter says it wrote, against the reference and with errors that must be found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.ops.requests.check_drafts import check_drafts
from lab.reference.requests.check_drafts import check_drafts_reference
from tests.support.columns import columns
from tests.support.sampling_slots import Slots

NUM_SLOTS, CAPACITY, VOCAB_SIZE = 4, 16, 10


def table(tokens):
    slots = Slots(NUM_SLOTS, VOCAB_SIZE, 0, CAPACITY)
    slots.tokens[:] = tokens
    return slots


@given(
    tokens=st.lists(st.sampled_from([0, 1, 5, 9, -1, 10, 2**31 - 1, -(2**31)]), min_size=8, max_size=8),
    slots=st.permutations(range(NUM_SLOTS)),
    counts=st.lists(
        st.tuples(st.integers(0, CAPACITY - 6), st.integers(-1, 6), st.integers(-2, 6)), max_size=NUM_SLOTS
    ),
)
def test_the_first_that_cannot_be_is_the_references(tokens, slots, counts):
    held = table(np.resize(np.array(tokens, np.int32), (NUM_SLOTS, CAPACITY)))
    first, num_new, room = [list(column) for column in zip(*counts, strict=True)] if counts else ([], [], [])
    arguments = held.array, *columns(slots[: len(counts)], first, num_new, room), VOCAB_SIZE
    assert check_drafts(*arguments) == check_drafts_reference(*arguments)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [({}, None), ({"num_new": 4}, 1), ({"num_new": -1}, 1), ({"token": VOCAB_SIZE}, 1), ({"token": -1}, 1)],
    ids=["none", "more than fit", "fewer than none", "above the vocabulary", "below it"],
)
def test_what_cannot_be_is_found(wrong, found):
    held = table(VOCAB_SIZE - 1)
    held.tokens[2, 7] = wrong.get("token", 0)  # the last of the second request's three
    num_new = [2, wrong.get("num_new", 3), 0]
    assert check_drafts(held.array, *columns([0, 2, 3], [1, 5, 9], num_new, [2, 3, 1]), VOCAB_SIZE) == found


def test_no_drafts_are_fine_where_too_many_are_pending():
    assert check_drafts(table(0).array, *columns([1], [4], [0], [-2]), VOCAB_SIZE) is None


def test_tokens_that_were_not_written_are_nobodys_business():
    held = table(-7)
    held.tokens[1, 4:6] = 3
    assert check_drafts(held.array, *columns([1], [4], [2], [9]), VOCAB_SIZE) is None
