"""The inputs of a pass against their reference, bit for bit, and the batches that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.transfer.fill_inputs import PassLimits, fill_inputs
from lab.reference.transfer.fill_inputs import fill_inputs_reference

NUM_SLOTS, MAX_ROWS, TOKENS_PER_BLOCK, MAX_SEQ_LEN, NUM_BLOCKS, VOCAB_SIZE, MAX_BRANCHES = 5, 24, 4, 32, 50, 99, 3
COLUMNS = MAX_SEQ_LEN // TOKENS_PER_BLOCK
MAX_REQUESTS = NUM_SLOTS + MAX_BRANCHES
UNWRITTEN = -7


def limits(has_branches: bool = True, width: int = COLUMNS) -> PassLimits:
    sizes = [MAX_REQUESTS + 1, MAX_REQUESTS, MAX_ROWS, MAX_ROWS, MAX_ROWS, MAX_REQUESTS + 1]
    starts = [0, *np.cumsum(sizes).tolist()]
    if not has_branches:
        starts[5] = -1
    return PassLimits(
        vocab_size=VOCAB_SIZE,
        max_seq_len=MAX_SEQ_LEN,
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=NUM_BLOCKS,
        max_num_requests=MAX_REQUESTS,
        max_num_rows=MAX_ROWS,
        max_num_branches=MAX_BRANCHES if has_branches else 0,
        max_blocks_per_seq=width,
        starts=starts,
    )


def unwritten(width: int = COLUMNS) -> np.ndarray:
    return np.full(2 * (MAX_REQUESTS + 1) + MAX_REQUESTS + 3 * MAX_ROWS + MAX_REQUESTS * width, UNWRITTEN, np.int32)


@st.composite
def batches(draw) -> RaggedBatch:
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(0, NUM_SLOTS))]
    counts = [draw(st.integers(1, 4)) for _ in slots]
    firsts = [draw(st.integers(0, MAX_SEQ_LEN - count)) for count in counts]
    parents = sorted(draw(st.lists(st.integers(0, max(len(slots) - 1, 0)), max_size=MAX_BRANCHES if slots else 0)))
    places = [(firsts[parent] + draw(st.integers(0, counts[parent] - 1)), slots[parent]) for parent in parents]
    return batch_of(
        [*slots, *(slot for _, slot in places)],
        [*firsts, *(place for place, _ in places)],
        [*counts, *[1] * len(parents)],
        parents if parents else draw(st.sampled_from(([], None))),
        seed=draw(st.integers(0, 99)),
    )


def batch_of(slots, firsts, counts, parents=None, seed=0) -> RaggedBatch:
    """Return requests with counts[i] rows from position firsts[i] on; the last ones are branches of `parents`."""
    random, int32 = np.random.default_rng(seed), lambda values: np.array(values, np.int32)
    num_rows = sum(counts)
    positions = [first + j for first, count in zip(firsts, counts, strict=True) for j in range(count)]
    table = random.integers(0, NUM_BLOCKS, (NUM_SLOTS, COLUMNS)).astype(np.int32)
    logit_rows = np.flatnonzero(random.random(num_rows) < 0.5)
    return RaggedBatch(
        int32(slots),
        int32(np.cumsum([0, *counts])),
        random.integers(0, VOCAB_SIZE, num_rows).astype(np.int32),
        int32(positions),
        int32(logit_rows),
        table,
        None if parents is None else int32(parents),
    )


@given(batch=batches(), width=st.integers(COLUMNS, COLUMNS + 2))
def test_sections_are_the_references(batch: RaggedBatch, width: int) -> None:
    found, wanted = unwritten(width), unwritten(width)
    fill_inputs(batch, limits(width=width), found)
    fill_inputs_reference(batch, limits(width=width), wanted)
    assert found.tolist() == wanted.tolist()


def test_by_hand() -> None:
    batch = batch_of([3, 1, 3], [6, 0, 7], [2, 1, 1], [0])
    out = unwritten()
    fill_inputs(batch, limits(), out)
    cu_q_lens, kv_lens, token_ids, positions, logit_rows, first_branch, table = np.split(out, limits().starts[1:])
    assert cu_q_lens.tolist() == [0, 2, 3, 4, 4, 4, 4, 4, 4]
    assert kv_lens.tolist() == [8, 1, 8, 0, 0, 0, 0, 0]
    assert positions.tolist() == [6, 7, 0, 7] + [0] * (MAX_ROWS - 4)
    assert (token_ids[:4].tolist(), token_ids[4:].any()) == (batch.token_ids.tolist(), False)
    assert logit_rows[: batch.logit_rows.size].tolist() == batch.logit_rows.tolist()
    assert first_branch.tolist() == [2, 3, 3, 3, 3, 3, 3, 3, 3]
    rows = table.reshape(MAX_REQUESTS, COLUMNS)
    assert rows[:3, :2].tolist() == batch.block_table[[3, 1, 3], :2].tolist(), "as far as position 7 reaches"
    assert (rows[:, 2:] == UNWRITTEN).all()
    assert (rows[3:] == UNWRITTEN).all()


def test_an_engine_without_branches_has_no_section_for_them() -> None:
    found, wanted = unwritten(), unwritten()
    batch = batch_of([3, 1], [6, 0], [2, 1])
    fill_inputs(batch, limits(has_branches=False), found)
    fill_inputs_reference(batch, limits(has_branches=False), wanted)
    assert found.tolist() == wanted.tolist()
    with pytest.raises(InvalidArgumentError, match="the engine allows 0 branches"):
        fill_inputs(batch_of([3, 3], [6, 7], [2, 1], [0]), limits(has_branches=False), found)


ONE = batch_of([3, 1], [6, 0], [2, 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [0, VOCAB_SIZE, 0]}, "token_ids are not all within 0 to 98"),
        ({"token_ids": [0, -1, 0]}, "token_ids are not all within 0 to 98"),
        ({"positions": [6, 8, 0]}, "a request's rows must be consecutive"),
        ({"positions": [-1, 0, 0]}, "positions reach from -1 to 0, allowed is 0 to 31"),
        ({"positions": [31, 32, 0]}, "positions reach from 0 to 32, allowed is 0 to 31"),
        ({"cu_rows": [0, 3, 3]}, "every request must have rows"),
        ({"slots": [NUM_SLOTS, 1]}, "slots are not all within 0 to 4"),
        ({"slots": [-1, 1]}, "slots are not all within 0 to 4"),
        ({"block_table": np.full((NUM_SLOTS, COLUMNS), NUM_BLOCKS)}, "block ids are not all within 0 to 49"),
        ({"block_table": np.full((NUM_SLOTS, COLUMNS), -1)}, "block ids are not all within 0 to 49"),
        ({"block_table": np.zeros((NUM_SLOTS, 1))}, "block ids are not all within 0 to 49"),
        ({"block_table": np.zeros((NUM_SLOTS, COLUMNS + 1))}, "block_table has 9 blocks per request"),
        ({"branch_parents": [0]}, None),
        ({"branch_parents": [1]}, "branch_parents is .1.; it must be ascending and within 0 to 0"),
        ({"branch_parents": [0, 0, 0]}, "the engine allows|branch_parents is"),
    ],
)
def test_batches_that_cannot_be_are_refused(fields: dict, message: str | None) -> None:
    wrong = replace(ONE, **{name: np.array(values, np.int32) for name, values in fields.items()})
    for run in (fill_inputs, fill_inputs_reference):
        if message is None:
            run(wrong, limits(), unwritten())
            continue
        with pytest.raises(InvalidArgumentError, match=message):
            run(wrong, limits(), unwritten())


def test_more_rows_or_requests_than_there_is_room_for_are_refused() -> None:
    many = batch_of([0] * 9, range(9), [1] * 9)
    long = batch_of([0], [0], [25])
    for batch in (many, long):
        with pytest.raises(InvalidArgumentError, match="the engine allows 24 rows of 8"):
            fill_inputs(batch, limits(), unwritten())
