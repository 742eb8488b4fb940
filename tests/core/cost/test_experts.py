"""Distinct experts in closed form against counted routes, and overlaps found again from counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm.core.cost.experts import Routing
from lab.simulation.router import SyntheticRouter
from tests.support.effort import pick

SIZES = pick([(128, 8), (8, 2)], [(128, 8), (32, 4), (64, 4), (8, 2)])
ROUTINGS = [Routing(*size, *overlaps) for size in SIZES for overlaps in ((0.3, 0.0), (0.45, 0.35), (0.6, 0.6))]
ROWS = [[1], [5], [9, 9], [1] * 16, [1, 2, 3, 9]]


def counted(routing: Routing, rows: list[int], rng: np.random.Generator, trials: int = 1000) -> tuple[float, float]:
    """Distinct experts of passes in which every expert is taken or not, as the closed form assumes it, and the standard
    error of their mean."""
    shape = (trials, routing.num_experts)
    across = max(routing.across, routing.chance)
    means = beta(rng, np.full(shape, routing.chance), (across - routing.chance) / (1.0 - routing.chance))
    used = np.zeros(shape, bool)
    for n in rows:
        chances = beta(rng, means, (routing.overlap - across) / (1.0 - across))
        for _ in range(n):
            used |= rng.random(shape) < chances
    counts = used.sum(1)
    return float(counts.mean()), float(counts.std() / np.sqrt(trials))


def beta(rng: np.random.Generator, means: np.ndarray, correlation: float) -> np.ndarray:
    if correlation <= 0.0:
        return means
    total = 1.0 / correlation - 1.0
    return rng.beta(np.maximum(means * total, 1e-9), np.maximum((1.0 - means) * total, 1e-9))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_closed_form_is_what_random_routes_count(routing):
    rng = np.random.default_rng(0)
    for rows in ROWS:
        mean, error = counted(routing, rows, rng)
        assert routing.distinct(rows) == pytest.approx(mean, abs=4.0 * error + 0.001 * mean)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_row_alone_takes_its_own_experts_and_many_take_all(routing):
    assert routing.distinct([1]) == pytest.approx(routing.top_k)
    assert routing.distinct([]) == 0.0
    assert 0.6 * routing.num_experts < routing.distinct([300] * 300) <= routing.num_experts + 1e-9


def test_rows_of_two_requests_that_are_as_alike_as_those_of_one_are_one_request():
    routing = Routing(64, 4, 0.3, 0.3)
    assert routing.distinct([2, 3, 4]) == pytest.approx(routing.distinct([9]))
    apart = replace(routing, across=0.0)
    unused = [1.0 - apart.distinct([n]) / 64 for n in (2, 3, 4)]
    assert apart.distinct([2, 3, 4]) == pytest.approx(64 * (1.0 - np.prod(unused)))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_spread_evenly_are_a_list_of_rows(routing):
    rows = np.arange(4, 37)
    found = routing.distinct_of(rows, 4)
    for n, count in zip(rows.tolist(), found.tolist(), strict=True):
        if n % 4 == 0:
            assert count == pytest.approx(routing.distinct([n // 4] * 4))
    assert routing.distinct_of(2, 4) == pytest.approx(routing.distinct([1, 1])), "a row each, where there are fewer"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_row_adds_no_more_than_the_one_before(routing):
    added = np.diff(routing.distinct_of(np.arange(4, 200), 4))
    assert (added[1:] <= added[:-1] + 1e-9).all()
    assert (added > 0.0).all()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_prompt_is_one_request_more_next_to_which_rows_get_cheap(routing):
    rows = np.arange(4, 37)
    reads = routing.reads_of(rows, 4)
    assert reads.distinct(0) == pytest.approx(routing.distinct_of(rows, 4))
    beside = reads.distinct(64)
    assert beside[4] == pytest.approx(routing.distinct([2] * 4 + [64]))
    assert (np.diff(beside) < np.diff(reads.distinct(0))).all()


@pytest.mark.parametrize(("overlap", "across"), [(0.2, 0.0), (0.45, 0.0), (0.4, 0.25), (0.6, 0.6)])
def test_overlaps_are_found_again_from_the_closed_forms_counts(overlap, across):
    true = Routing(128, 8, overlap, across)
    shapes = [(n * each, n) for n in (1, 2, 4, 8, 16) for each in (1, 2, 4, 8)]
    found = Routing(128, 8).fitted([(*shape, float(true.distinct_of(*shape))) for shape in shapes])
    assert found.overlap == pytest.approx(overlap, abs=0.02)
    assert max(found.across, true.chance) == pytest.approx(max(across, true.chance), abs=0.02)


@pytest.mark.parametrize(("overlap", "across"), [(0.25, 0.0), (0.45, 0.0), (0.45, 0.3)])
def test_the_closed_form_is_near_a_router_with_topics_that_fade(overlap, across):
    """Its assumptions do not hold there: rows far apart are less alike, and a row takes exactly k."""
    router = SyntheticRouter(Routing(128, 8, overlap, across), num_requests=16, num_positions=64)
    passes = [(n, each, first) for n in (1, 4, 16) for each in (1, 2, 4, 8) for first in range(0, 40, 5)]
    counts = [(n * each, n, count(router, n, each, first)) for n, each, first in passes]
    found = Routing(128, 8).fitted(counts)
    shapes = sorted({(rows, requests) for rows, requests, _ in counts})
    for rows, requests in shapes:
        mean = np.mean([c for r, n, c in counts if (r, n) == (rows, requests)])
        assert float(found.distinct_of(rows, requests)) == pytest.approx(mean, rel=0.12)


def count(router: SyntheticRouter, num_requests: int, each: int, first: int) -> float:
    requests = np.repeat(np.arange(num_requests), each)
    return router.distinct(requests, np.tile(np.arange(first, first + each), num_requests))


@pytest.mark.parametrize("sizes", [(0, 0), (8, 0), (8, 9), (1 << 20, 8), (8, 2, -0.1), (8, 2, 0.5, 1.5)])
def test_what_no_layer_can_have_is_refused(sizes):
    with pytest.raises(ValueError, match="must be"):
        Routing(*sizes)
