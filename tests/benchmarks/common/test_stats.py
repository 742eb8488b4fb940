"""Medians and paired ratios."""

import pytest

from benchmarks.common.stats import paired_ratio, summarize


def test_summary_is_median_and_range() -> None:
    summary = summarize([5.0, 1.0, 9.0, 2.0, 4.0])
    assert (summary.median, summary.low, summary.high) == (4.0, 1.0, 9.0)


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is half as fast in the second round; twice as fast stays twice as fast.
    baseline, values = [100.0, 50.0, 100.0], [200.0, 100.0, 200.0]
    ratio = paired_ratio(values, baseline)
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)


def test_ratio_of_medians_is_not_the_median_of_ratios() -> None:
    assert paired_ratio([1.0, 4.0, 6.0], [1.0, 2.0, 12.0]).median == 1.0


def test_rounds_must_match() -> None:
    with pytest.raises(ValueError, match="2 rounds against 1"):
        paired_ratio([1.0, 2.0], [1.0])


def test_a_summary_in_words() -> None:
    assert summarize([1.05, 0.978, 1.02]).words() == "1.02, 0.98 to 1.05"
    assert summarize([1.0216]).words(3) == "1.022"
