"""Calibration of pruning on synthetic observations whose truth is known."""

import numpy as np
import pytest

from faser_trtllm.core.cost_table import CostCurve, CostTable, ExitModel, Fingerprint
from faser_trtllm.profiling.exit_models import ExitQuality, fit_exit_models, judge
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


def table_of(exit_ms: float) -> CostTable:
    """0.1 ms per row, in equal parts by two segments."""
    whole, half = CostCurve((1, 401), (0.1, 40.1)), CostCurve((1, 401), (0.05, 20.05))
    curves = {"verify@all": whole, "segment:0@all": half, "segment:1@all": half}
    return CostTable(
        Fingerprint("cpu", "isa", 2, "engine"), curves | {"exit:1@all": CostCurve((1, 2), (exit_ms, exit_ms))}
    )


def quality(precision: float, baseline: float, num_dropped: int = 400) -> ExitQuality:
    return ExitQuality(1, 4, 0.3, precision, 0.5, 0.4, num_dropped, baseline, 0.5)


@pytest.mark.parametrize(
    ("exit_ms", "precision", "baseline", "pays"),
    [
        (0.0, 1.0, 0.0, True),  # it knows what confidence does not
        (0.0, 1.0, 1.0, False),  # confidence knows as much, and before the pass
        (0.0, 0.0, 0.0, False),  # it drops what would have been accepted
        (50.0, 1.0, 0.0, False),  # looking costs more than it saves
    ],
)
def test_pays_only_beyond_confidence(exit_ms: float, precision: float, baseline: float, pays: bool) -> None:
    models = [ExitModel(1, -1.0, 0.0, 1.0, 0.0)]
    assert judge(models, [quality(precision, baseline)], table_of(exit_ms), 6, 0.5)[0].pays is pays


def test_few_observations_prove_nothing() -> None:
    models = [ExitModel(1, -1.0, 0.0, 1.0, 0.0)]
    assert not judge(models, [quality(1.0, 0.0, num_dropped=5)], table_of(0.0), 6, 0.5)[0].pays
