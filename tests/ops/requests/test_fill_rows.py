"""The native batch against its reference, bit for bit, and the bounds that it keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.requests.fill_rows import RowFiller
from lab.reference.requests.fill_rows import fill_rows_reference
from tests.support.sampling_slots import Slots

NUM_SLOTS, CAPACITY, MAX_ROWS = 4, 24, 32
TABLE = np.zeros((NUM_SLOTS, 3), np.int32)
FIELDS = ("slots", "cu_rows", "token_ids", "positions", "logit_rows")


def columns(requests):
    """Slots, first, end and num_logit_rows of (slot, first, end, num_logit_rows) each."""
    return np.ascontiguousarray(np.array(requests, np.int32).reshape(-1, 4).T)


def filled_slots(seed=0):
    slots = Slots(NUM_SLOTS, 100, 0, CAPACITY)
    slots.tokens[:] = np.random.default_rng(seed).integers(0, 100, slots.tokens.shape)
    return slots


@st.composite
def requests(draw):
    found = []
    for slot in draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(0, NUM_SLOTS))]:
        first = draw(st.integers(0, CAPACITY - 1))
        end = draw(st.integers(first + 1, min(CAPACITY, first + 8)))
        found.append((slot, first, end, draw(st.integers(0, end - first))))
    return found


@given(batches=st.lists(requests(), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_a_batch_is_the_references(batches, seed):
    slots, filler = filled_slots(seed), RowFiller(NUM_SLOTS, MAX_ROWS, TABLE)
    for batch in batches:  # the buffers are used again, so that what an older batch left must not show
        found = filler.fill(slots.array, *columns(batch))
        wanted = fill_rows_reference(slots.array, *columns(batch), TABLE)
        assert found.block_table is TABLE
        for field in FIELDS:
            array = getattr(found, field)
            assert array.tolist() == getattr(wanted, field).tolist(), field
            assert (array.dtype, array.flags.c_contiguous) == (np.int32, True)


@pytest.mark.parametrize(
    "request_",
    [(0, 0, 9, 1), (0, 3, 3, 0), (0, 4, 3, 0), (0, -1, 2, 1), (0, 0, 4, 5), (0, 0, 4, -1)],
    ids=["too many rows", "no rows", "an end before the first", "a position below 0", "logits", "fewer than no logits"],
)
def test_rows_that_cannot_be_are_refused(request_):
    filler = RowFiller(NUM_SLOTS, 8, TABLE)
    with pytest.raises(InvalidArgumentError, match="building a batch of 1 requests in 8 rows"):
        filler.fill(filled_slots().array, *columns([request_]))


def test_a_slot_without_a_request_is_refused():
    slots = filled_slots()
    slots.array[1]["tokens"] = 0
    with pytest.raises(InvalidArgumentError, match="building a batch"):
        RowFiller(NUM_SLOTS, 8, TABLE).fill(slots.array, *columns([(1, 0, 2, 1)]))


def test_more_requests_than_there_is_room_for_are_refused():
    with pytest.raises(ValueError, match="a batch of 2 requests, there is room for 1"):
        RowFiller(1, 8, TABLE).fill(filled_slots().array, *columns([(0, 0, 1, 1), (1, 0, 1, 1)]))
