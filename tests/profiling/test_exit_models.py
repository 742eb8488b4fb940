"""Calibration of pruning on synthetic observations whose truth is known."""

import numpy as np
import pytest

from faser_trtllm.profiling.exit_models import fit_exit_models
from faser_trtllm.profiling.logistic import sigmoid
from faser_trtllm.profiling.recording import Observations


def observe(n: int, informative: bool, seed: int = 0) -> Observations:
    """The first boundary says nothing; the second tells the truth through the rank, if informative."""
    rng = np.random.default_rng(seed)
    margin = rng.exponential(2.0, n)
    accepted = rng.random(n) < sigmoid(0.6 * margin)
    noise = rng.integers(0, 4, (n, 2)).astype(float)
    if informative:
        noise[:, 1] = np.where(accepted, rng.integers(0, 2, n), rng.integers(2, 8, n))
    return Observations(np.zeros(n, np.int32), margin, noise, noise * 0.0, accepted)


def test_an_informative_layer_beats_confidence() -> None:
    models, qualities = fit_exit_models(observe(4000, True), (1, 2), (4, 8))
    assert [m.boundary for m in models] == [1, 2]
    assert abs(models[0].rank) < 0.3
    assert models[1].rank < -1.0
    blind = next(q for q in qualities if q.boundary == 1 and q.threshold == 0.1)
    seeing = next(q for q in qualities if q.boundary == 2 and q.threshold == 0.1)
    assert seeing.layer == 8
    assert seeing.recall > 0.9
    assert seeing.precision > 0.9
    assert seeing.precision > seeing.baseline_precision + 0.2
    assert blind.share < 0.05


def test_confidence_alone_is_kept_where_layers_say_nothing() -> None:
    models, _ = fit_exit_models(observe(6000, False), (1, 2), (4, 8))
    for model in models:
        assert model.survival == pytest.approx(1.0, abs=0.25)
        assert abs(model.rank) < 0.2


def test_too_few_observations_give_no_model() -> None:
    assert fit_exit_models(observe(50, True), (1, 2), (4, 8)) == ([], [])


def test_nothing_rejected_gives_no_model() -> None:
    seen = observe(1000, True)
    seen.accepted[:] = True
    assert fit_exit_models(seen, (1, 2), (4, 8)) == ([], [])
