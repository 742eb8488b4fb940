"""The grid stays inside what engines allow, and held-out points are never fitted."""

import pytest

from faser_trtllm.profiling.grid import Limits, draft_points, held_out_points, verify_points
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import grid

LIMITS = [
    Limits(max_rows=320, max_num_requests=32, max_context=1024, max_draft_len=8),
    Limits(max_rows=16, max_num_requests=2, max_context=40, max_draft_len=3),
    Limits(max_rows=64, max_num_requests=1, max_context=300, max_draft_len=1),
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("quick", [False, True])
def test_points_fit_the_engines(limits, quick, tmp_path) -> None:
    points = grid(limits, ("all", "verify", "draft"), ProfileOptions(tmp_path, quick=quick))
    assert points
    for point in points:
        assert 1 <= point.num_requests <= min(point.num_rows, limits.max_num_requests)
        assert point.num_rows <= limits.max_rows
        assert point.context_len <= limits.longest(point.num_requests) <= limits.max_context
        if point.kind == "verify":
            assert point.num_rows <= point.num_requests * (1 + limits.max_draft_len)
    kinds = {(point.kind, point.partition) for point in points}
    assert {("verify", "all"), ("draft_step", "all")} <= kinds
    assert len(set(points)) == len(points)


@pytest.mark.parametrize("quick", [False, True])
def test_held_out_points_are_not_on_the_grid(quick, tmp_path) -> None:
    points = grid(LIMITS[0], ("all",), ProfileOptions(tmp_path, quick=quick))
    held_out = {(p.kind, p.num_rows, p.num_requests, p.context_len) for p in points if p.held_out}
    fitted = {(p.kind, p.num_rows, p.num_requests, p.context_len) for p in points if not p.held_out}
    assert {kind for kind, *_ in held_out} == {"verify", "draft_step", "draft_rows", "decode"}
    assert not held_out & fitted


def test_the_edge_of_a_tile_is_measured() -> None:
    rows = {p.num_rows for p in verify_points(LIMITS[0], "all", quick=False)}
    assert {16, 17, 32, 33, 64, 65} <= rows


def test_a_quick_grid_has_every_length_of_one_request() -> None:
    """Between measured counts a stair looks like a slope, and a length that looks dear is never tried."""
    rows = {p.num_rows for p in verify_points(LIMITS[0], "all", quick=True) if p.num_requests == 1}
    assert rows == set(range(1, 2 + LIMITS[0].max_draft_len))


@pytest.mark.parametrize("quick", [False, True])
def test_every_kind_is_measured_at_two_contexts_and_with_many_requests(quick, tmp_path) -> None:
    """With one context, or a few requests, what a context costs is a guess, which long contexts multiply."""
    points = grid(LIMITS[0], ("all",), ProfileOptions(tmp_path, quick=quick))
    for kind in ("verify", "decode", "draft_step", "draft_rows"):
        fitted = [p for p in points if p.kind == kind and not p.held_out]
        for num_requests in (1, 32):
            assert {64, 256} <= {p.context_len for p in fitted if p.num_requests == num_requests}, kind


def test_edges_of_a_gpus_tiles_are_measured() -> None:
    gpu = Limits(max_rows=1280, max_num_requests=256, max_context=320, max_draft_len=8)
    for quick in (False, True):
        assert {64, 65, 128, 129, 256, 257} <= {p.num_rows for p in verify_points(gpu, "all", quick)}


def test_a_long_catch_up_is_measured_however_short_the_longest_context_is() -> None:
    bench = Limits(max_rows=1280, max_num_requests=256, max_context=256, max_draft_len=8)
    for point in draft_points(bench, "all", quick=True):
        if point.kind == "draft_rows":
            assert point.context_len + point.num_rows // point.num_requests <= 256 + 8 + 1
    rows = {
        p.num_rows for p in draft_points(bench, "all", quick=True) if p.kind == "draft_rows" and p.num_requests == 1
    }
    assert {16, 64} <= rows


def test_seed_decides_held_out_points() -> None:
    first, again, other = (list(held_out_points(LIMITS[0], seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(list(held_out_points(LIMITS[0], 1, quick=True))) < len(first)


def test_catch_up_is_measured_with_a_token_or_two_of_each_request_and_with_many_of_one() -> None:
    points = {
        (p.num_rows, p.num_requests) for p in draft_points(LIMITS[0], "all", quick=False) if p.kind == "draft_rows"
    }
    assert all(rows >= requests for rows, requests in points)
    assert {(1, 1), (2, 1), (64, 1), (8, 8), (16, 8)} <= points
