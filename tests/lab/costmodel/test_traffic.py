"""Two streams on one memory: who waits, and until when."""

import pytest

from lab.costmodel.traffic import Traffic, Work, side_by_side

HALVES = Traffic({"target": 10.0, "draft": 1.0}, {"target": 0.001, "draft": 0.0}, {"all": 2.0, "a": 1.5, "b": 1.5})


def test_a_pass_reads_its_weights_and_every_request_its_cache():
    assert HALVES.of_pass("target", 4, 100.0) == pytest.approx(10.4)
    assert HALVES.of_pass("draft", 4, 100.0) == 1.0


def test_a_lane_waits_for_what_the_other_draws_of_the_bandwidth():
    """Each draws 0.5 of 2 GB/ms, a quarter: the draft waits nearly twice as much for the pass as that for the draft."""
    slowdowns = HALVES.slowdowns(Work(10.0, 5.0), "a", Work(20.0, 10.0), "b")
    assert slowdowns == pytest.approx((1 / (1 - 0.55 / 4), 1 / (1 - 0.3 / 4)))


def test_both_together_draw_no_more_than_there_is():
    """On a GPU where each side of a split could draw all of it."""
    traffic = Traffic({}, {}, dict.fromkeys(("all", "a", "b"), 2.0))
    draft, verify = traffic.slowdowns(Work(10.0, 20.0), "a", Work(20.0, 40.0), "b")
    assert 1.0 / draft + 1.0 / verify == pytest.approx(1.0)
    assert draft > verify > 1.0


def test_a_lane_beside_one_that_only_computes_does_not_wait():
    draft, verify = HALVES.slowdowns(Work(10.0, 15.0), "a", Work(20.0, 0.0), "b")
    assert draft == 1.0
    assert verify > 1.2


def test_no_lane_draws_more_than_its_partition_can():
    """15 GB in a millisecond would be seven times what there is."""
    assert HALVES.slowdowns(Work(1.0, 15.0), "a", Work(20.0, 0.0), "b") == pytest.approx((1.0, 1 / (1 - 0.3 * 0.75)))


def test_an_empty_lane_slows_nobody():
    assert HALVES.slowdowns(Work(0.0, 0.0), "a", Work(20.0, 30.0), "b") == (1.0, 1.0)


@pytest.mark.parametrize("swap", [False, True])
def test_the_longer_lane_goes_on_alone_at_its_own_speed(swap):
    """10 ms slowed to 15; by then half of the other's 20 ms (slowed: 30) is done, and 10 remain."""
    works, slowdowns = (20.0, 10.0) if swap else (10.0, 20.0), (1.5, 1.5)
    ends = side_by_side(*works, slowdowns)
    assert sorted(ends) == pytest.approx([15.0, 25.0])
    assert (ends[0] < ends[1]) is not swap


def test_nothing_beside_it_ends_at_once():
    assert side_by_side(0.0, 7.0, (1.0, 1.0)) == (0.0, 7.0)
    assert side_by_side(7.0, 0.0, (1.0, 1.0)) == (7.0, 0.0)
