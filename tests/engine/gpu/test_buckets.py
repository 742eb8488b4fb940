"""Row counts that passes are padded to."""

from __future__ import annotations

import pytest

from faser_trtllm.engine.buckets import MAX_GRAPH_ROWS, Buckets


@pytest.mark.parametrize("buckets", [Buckets(512, 2048), Buckets(288, 2048), Buckets(20, 96), Buckets(1, 5000)])
def test_a_pass_has_the_smallest_size_that_holds_it(buckets: Buckets) -> None:
    sizes = (*buckets.sizes(), *buckets.large_sizes())
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == buckets.largest
    assert buckets.limit == buckets.sizes()[-1]
    for rows in range(1, buckets.largest + 1):
        assert buckets.rows(rows) == next(size for size in sizes if size >= rows)


def test_what_is_larger_than_all_runs_as_it_is() -> None:
    """And is refused by who knows the limit."""
    assert Buckets(64).rows(65) == 65
    assert Buckets(64, 96).rows(97) == 97


def test_large_passes_are_padded_to_multiples_of_64_and_then_by_an_eighth_at_most() -> None:
    sizes = Buckets(MAX_GRAPH_ROWS, 8192).large_sizes()
    assert sizes[:10] == (576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280)
    assert len(sizes) == 32
    assert all(b - a <= max(64, a / 8) for a, b in zip((512, *sizes), sizes, strict=False))
    assert all(Buckets(MAX_GRAPH_ROWS, n).large_sizes() == (*(s for s in sizes if s < n), n) for n in (600, 2000, 2048))


def test_coarse_ones_double() -> None:
    assert Buckets(20, 100, is_coarse=True).large_sizes() == (40, 80, 100)
    assert Buckets(32, 128, is_coarse=True).large_sizes() == (64, 128)
    assert Buckets(32, 32, is_coarse=True).large_sizes() == ()
