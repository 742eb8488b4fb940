"""The choices of a launch of attention: its grid, its slots, its chunks and where they are merged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.ops.cuda import verify_attention as op


def _shape(**changes) -> op.AttentionShape:
    sizes = {"num_rows": 1, "batch_size": 1, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_blocks": 10}
    sizes |= {"tokens_per_block": 16, "max_blocks_per_seq": 5}
    return op.AttentionShape(**(sizes | changes), dtype="bf16", kv_dtype="bf16")


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([1, 3, 8]), st.sampled_from(op.TILE_ROWS)
)
def test_the_grid_has_room_for_every_tile_and_one_more(num_rows, group, tile_rows):
    shape = _shape(num_rows=sum(num_rows), batch_size=len(num_rows), num_heads=group, num_kv_heads=1)
    needed = sum(-(-rows * group // tile_rows) for rows in num_rows)
    assert needed + 1 <= op.num_tiles(shape, tile_rows)


def test_slots_are_for_every_row_and_chunk_as_far_as_the_workspace_goes():
    few = _shape(num_rows=4, batch_size=1, max_blocks_per_seq=10_000)
    assert op.choose_max_slots(few, op.MAX_WHOLE_TOKENS) == 0
    assert op.choose_max_slots(few, op.MAX_WHOLE_TOKENS + 1) == 8
    assert op.choose_max_slots(few, 100_000) == 4 * 195
    assert op.choose_max_slots(_shape(num_rows=4), 100_000) == 0, "the table has room for 80 tokens"
    assert op.choose_max_slots(few, 100_000, split_tokens=128) == 4 * 781
    for is_causal in (True, False):
        windowed = _shape(num_rows=4, max_blocks_per_seq=10_000, window=4096, is_causal=is_causal)
        assert op.choose_max_slots(windowed, 100_000) == 4 * 10
    many = _shape(num_rows=4096, batch_size=64, max_blocks_per_seq=10_000)
    further = op.choose_max_slots(many, 100_000) - 4096
    assert op.workspace_bytes(many, further) == pytest.approx(64 << 20, rel=1e-3)
    assert op.workspace_bytes(few, 2) == 2 * 32 * 130 * 4
    assert op.choose_tile_rows(few, 4) == 16
    assert op.choose_tile_rows(few, 5) == 64


def test_a_second_launch_merges_what_would_keep_one_block_busy():
    shape = _shape(num_rows=4, batch_size=1, max_blocks_per_seq=10_000)
    for tile_rows, longest in ((64, 4351), (16, 16639)):
        for context, in_place in ((longest, True), (longest + 1, False)):
            slots = op.choose_max_slots(shape, context)
            assert op.merges_in_place(shape, tile_rows, tile_rows, slots, context) == in_place
    few = _shape(num_rows=5, batch_size=1, max_blocks_per_seq=10_000)
    for context, in_place in ((13055, True), (13056, False)):  # 20 rows of the tile's 64
        assert op.merges_in_place(few, 64, 5, op.choose_max_slots(few, context), context) == in_place
    many = _shape(num_rows=4096, batch_size=4096, max_blocks_per_seq=10_000)
    for context, in_place in ((1000, True), (4000, True)):
        assert op.merges_in_place(many, 64, 64, op.choose_max_slots(many, context), context) == in_place
    wide = _shape(num_rows=4096, batch_size=4096, max_blocks_per_seq=10_000, num_kv_heads=32)
    assert not op.merges_in_place(wide, 64, 64, op.choose_max_slots(wide, 4000), 4000), "more tiles than counters"


def test_chunks_are_short_where_few_requests_would_leave_sms_idle():
    def chosen(batch_size, num_rows, max_kv_len, deterministic=False):
        shape = _shape(num_rows=batch_size * num_rows, batch_size=batch_size, max_blocks_per_seq=10_000)
        return op.choose_split_tokens(shape, num_rows, max_kv_len, 132, deterministic)

    assert [chosen(n, 1, 4096) for n in (1, 4, 5, 8, 9, 128)] == [128, 128, 256, 256, 512, 512]
    assert [chosen(1, 1, longest) for longest in (767, 16384, 32768)] == [128, 128, 256]
    assert [chosen(1, 5, longest) for longest in (2048, 4096, 8192)] == [128, 256, 512]
    assert chosen(1, 5, 16384) == 128, "a second launch merges in any case"
    assert chosen(1, 2048, 4096) == 512
    assert [chosen(1, 5, 131_072), chosen(1, 8, 131_072), chosen(4, 4, 131_072)] == [256, 512, 512], "room for slots"
    assert chosen(1, 1, 4096, deterministic=True) == 512
