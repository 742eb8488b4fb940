"""Calibration of pruning: how well an intermediate layer foresees that a draft will be rejected.

The signal is FASER's (arXiv 2604.20503): the place of the draft among its candidates by the target's intermediate
scores, here with the score gap and the estimate that the draft's own confidence gives before the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.cost_table import ExitModel
from faser_trtllm.profiling.logistic import fit_logistic, logit, sigmoid
from faser_trtllm.profiling.recording import MAX_RANK, Observations

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
MIN_OBSERVATIONS = 200
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExitQuality:
    """Dropping what the model gives less than threshold, on observations that it was not fitted to.

    precision: of the dropped, rejected indeed. recall: of the rejected, dropped. share: dropped of all tested.
    baseline_precision, baseline_recall: of the draft's confidence alone, dropping as many.
    """

    boundary: int
    layer: int
    threshold: float
    precision: float
    recall: float
    share: float
    baseline_precision: float
    baseline_recall: float


def fit_exit_models(
    seen: Observations, boundaries: Sequence[int], layers: Sequence[int]
) -> tuple[list[ExitModel], list[ExitQuality]]:
    """Fit on one half of the observations and judge on the other; ([], []) if there are too few.

    boundaries: indices into EngineSpec.segments, in the order of seen.rank's columns; layers: their depths.
    """
    n = seen.accepted.size
    half = np.arange(n) % 2 == 0
    if n < MIN_OBSERVATIONS or not 0 < seen.accepted[half].sum() < half.sum():
        return [], []
    labels = seen.accepted.astype(np.float64)
    prior = confidence(seen, half)
    models, qualities = [], []
    for column, (boundary, layer) in enumerate(zip(boundaries, layers, strict=True)):
        features = np.column_stack([np.minimum(seen.rank[:, column], MAX_RANK), seen.gap[:, column], logit(prior)])
        weights = fit_logistic(features[half], labels[half])
        rank, gap, survival, intercept = (float(w) for w in weights)
        models.append(ExitModel(boundary, rank, gap, survival, intercept))
        estimate = sigmoid(features @ weights[:-1] + intercept)
        for threshold in THRESHOLDS:
            qualities.append(_quality(boundary, layer, threshold, estimate[~half], prior[~half], seen.accepted[~half]))
    return models, qualities


def confidence(seen: Observations, fitted: npt.NDArray[np.bool_]) -> FloatArray:
    """The estimate before the pass, from margin and place, fitted on the observations marked -> [n]."""
    places = seen.place[:, None] == np.arange(1, int(seen.place.max(initial=0)) + 1)
    features = np.column_stack([seen.margin, places.astype(np.float64)])
    weights = fit_logistic(features[fitted], seen.accepted[fitted].astype(np.float64))
    return sigmoid(features @ weights[:-1] + weights[-1])


def _quality(
    boundary: int,
    layer: int,
    threshold: float,
    estimate: FloatArray,
    prior: FloatArray,
    accepted: npt.NDArray[np.bool_],
) -> ExitQuality:
    dropped = estimate < threshold
    num_dropped = int(dropped.sum())
    by_prior = np.zeros_like(dropped)
    by_prior[np.argsort(prior, kind="stable")[:num_dropped]] = True
    return ExitQuality(
        boundary,
        layer,
        threshold,
        *_precision_recall(dropped, accepted),
        num_dropped / accepted.size,
        *_precision_recall(by_prior, accepted),
    )


def _precision_recall(dropped: npt.NDArray[np.bool_], accepted: npt.NDArray[np.bool_]) -> tuple[float, float]:
    hits = int((dropped & ~accepted).sum())
    return hits / max(1, int(dropped.sum())), hits / max(1, int((~accepted).sum()))
