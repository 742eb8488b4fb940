"""Calibration of pruning: how well an intermediate layer predicts that a draft will be rejected.

The signal is FASER's (arXiv 2604.20503): the draft's rank among its candidates by the target's intermediate scores.
Here the score gap and an estimate from the draft model's confidence before the pass are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.cost_table import CostTable, ExitModel
from faser_trtllm.profiling.logistic import fit_logistic, logit, sigmoid
from faser_trtllm.profiling.recording import MAX_RANK, Observations

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
MIN_OBSERVATIONS = 200
PAY_BATCHES = (4, 8, 16, 32)
PAY_CONTEXT = 256
MIN_PAY = 0.01  # share of the pass's time
MIN_DROPPED = 30
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExitQuality:
    """How good it is to drop drafts whose estimates are below threshold, on held-out observations.

    precision: rejected share of the dropped. recall: dropped share of the rejected. share: dropped share of all tested.
    baseline_precision, baseline_recall: the same if as many are dropped by the draft model's confidence alone.
    """

    boundary: int
    layer: int
    threshold: float
    precision: float
    recall: float
    share: float
    num_dropped: int
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


def judge(
    models: Sequence[ExitModel], qualities: Sequence[ExitQuality], table: CostTable, num_drafts: int, acceptance: float
) -> list[ExitModel]:
    """Return the models with `pays` set where early exit saves more time than the draft model's confidence alone.

    The gain, for full batches of num_drafts drafts per request, is the time that the dropped rows save minus the value
    in time of the accepted drafts among them. It is computed for early exit (rows run up to the boundary, and scoring
    costs time) and for leaving out as many rows before the pass by confidence. At some threshold, early exit must
    exceed that gain and zero by MIN_PAY of the pass, averaged over batch sizes since one may be at the edge of a tile.
    Thresholds that dropped fewer than MIN_DROPPED observations are ignored. acceptance: mean share of accepted drafts.
    """
    tokens_each = sum(acceptance**j for j in range(num_drafts + 1))
    return [
        replace(
            model,
            pays=any(
                np.mean([_gain(table, q, batch, num_drafts, tokens_each) for batch in PAY_BATCHES]) > MIN_PAY
                for q in qualities
                if q.boundary == model.boundary and q.num_dropped >= MIN_DROPPED
            ),
        )
        for model in models
    ]


def _gain(table: CostTable, q: ExitQuality, batch: int, num_drafts: int, tokens_each: float) -> float:
    rows = batch * (1 + num_drafts)
    dropped = round(q.share * batch * num_drafts)
    pass_ms = table.verify_ms(rows, batch, PAY_CONTEXT)
    token_ms = pass_ms / (batch * tokens_each)
    ahead, whole = (table.remaining_ms_array(b, rows, batch, PAY_CONTEXT)[rows] for b in (q.boundary, 0))
    saved_ms = pass_ms - table.verify_ms(rows - dropped, batch, PAY_CONTEXT)
    by_confidence = saved_ms - dropped * (1 - q.baseline_precision) * token_ms
    # Both use the curve of whole passes, since the difference of two curves would mostly be their errors.
    by_exit = saved_ms * float(ahead / whole) - dropped * (1 - q.precision) * token_ms
    by_exit -= table.exit_ms(q.boundary, batch * num_drafts)
    return (by_exit - max(0.0, by_confidence)) / pass_ms


def confidence(seen: Observations, fitted: npt.NDArray[np.bool_]) -> FloatArray:
    """Return acceptance estimates [n] from margin and place, known before the pass. fitted: observations to fit on."""
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
        num_dropped,
        *_precision_recall(by_prior, accepted),
    )


def _precision_recall(dropped: npt.NDArray[np.bool_], accepted: npt.NDArray[np.bool_]) -> tuple[float, float]:
    hits = int((dropped & ~accepted).sum())
    return hits / max(1, int(dropped.sum())), hits / max(1, int((~accepted).sum()))
