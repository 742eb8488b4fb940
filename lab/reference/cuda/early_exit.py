"""References of ops/cuda/early_exit.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm.ops.arrays import Float32Array, Int32Array
from lab.reference.early_exit import early_exit_reference as scores_reference


def early_exit_reference(
    hidden: Float32Array,
    rows: Int32Array,
    final_norm: Float32Array,
    lm_head: Float32Array,
    candidates: Int32Array,
    drafted_place: Int32Array,
    rms_norm_eps: float,
) -> tuple[Float32Array, Int32Array, Float32Array]:
    """Compute early_exit() in numpy; return scores, rank and gap.

    A row or token that does not exist scores -inf. rank: how many candidates score above the drafted one; gap >= 0: the
    best score minus the drafted one's, inf if the drafted one has no score, 0 if no candidate has one. An invalid
    drafted_place counts as a candidate without a score.
    """
    exists = (rows >= 0) & (rows < hidden.shape[0])
    known = np.where((candidates >= 0) & (candidates < lm_head.shape[0]) & exists[:, None], candidates, -1)
    scores = scores_reference(hidden[np.where(exists, rows, 0)], final_norm, lm_head, known, rms_norm_eps)
    has_place = (drafted_place >= 0) & (drafted_place < candidates.shape[1])
    places = np.where(has_place, drafted_place, 0)
    drafted = np.where(has_place, np.take_along_axis(scores, places[:, None], 1)[:, 0], -np.inf)
    rank = (scores > drafted[:, None]).sum(1, dtype=np.int32)
    with np.errstate(invalid="ignore"):
        gap = np.where(rank > 0, scores.max(1) - drafted, 0).astype(np.float32)
    return scores, rank, gap
