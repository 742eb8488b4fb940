"""The batch builder against the definition of a ragged batch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.core.batch import BatchBuilder

MAX_SEQ_LEN = 24
TABLE = np.zeros((4, 3), np.int32)


@st.composite
def requests(draw):
    """(slot, tokens, first, end, num_logit_rows) of up to 4 requests."""
    found = []
    for slot in draw(st.permutations(range(4)))[: draw(st.integers(0, 4))]:
        first = draw(st.integers(0, MAX_SEQ_LEN - 1))
        end = draw(st.integers(first + 1, min(MAX_SEQ_LEN, first + 6)))
        tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=MAX_SEQ_LEN, max_size=MAX_SEQ_LEN)), np.int32)
        found.append((slot, tokens, first, end, draw(st.integers(0, end - first))))
    return found


@given(batches=st.lists(requests(), min_size=1, max_size=3))
def test_a_batch_has_every_requests_rows_one_after_the_other(batches):
    builder = BatchBuilder(TABLE)
    for added in batches:  # what an older batch left must not show
        builder.clear()
        slots, cu_rows, token_ids, positions, logit_rows = [], [0], [], [], []
        for slot, tokens, first, end, num_logit_rows in added:
            builder.add(slot, tokens, first, end, num_logit_rows)
            slots.append(slot)
            token_ids += tokens[first:end].tolist()
            positions += range(first, end)
            logit_rows += range(len(positions) - num_logit_rows, len(positions))
            cu_rows.append(len(positions))
        batch = builder.build()
        assert (batch.num_requests, batch.num_rows) == (len(slots), len(positions))
        assert batch.slots.tolist() == slots
        assert batch.cu_rows.tolist() == cu_rows
        assert batch.token_ids.tolist() == token_ids
        assert batch.positions.tolist() == positions
        assert batch.logit_rows.tolist() == logit_rows
        assert batch.block_table is TABLE
        for array in (batch.slots, batch.cu_rows, batch.token_ids, batch.positions, batch.logit_rows):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
