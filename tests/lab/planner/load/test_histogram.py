import numpy as np
import pytest

from lab.planner.load.histogram import Histogram


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_right_within_a_percent(share):
    values = np.random.default_rng(0).lognormal(3.0, 1.5, 20_000)
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.percentile(share) == pytest.approx(np.quantile(values, share), rel=0.011)
    assert histogram.mean == pytest.approx(values.mean())
    assert len(histogram) == 20_000


def test_of_nothing_it_is_zero_and_the_extremes_are_kept_in_range():
    histogram = Histogram()
    assert (histogram.percentile(0.5), histogram.mean) == (0.0, 0.0)
    histogram.add(0.0)
    histogram.add(1e12)
    assert histogram.percentile(0.5) == pytest.approx(1e-3)
    assert histogram.percentile(1.0) == pytest.approx(1e8, rel=0.011)
