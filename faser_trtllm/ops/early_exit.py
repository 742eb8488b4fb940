"""Early exit: the target's intermediate scores of the draft's candidates between two segments (the Top-K signal of
FASER, arXiv 2604.20503).

plugins/cpu/early_exit.cpp computes the scores inside the engine (Engine.early_exit).
"""

from __future__ import annotations

import numpy as np

from faser_trtllm.ops.arrays import Float32Array, Int32Array


def early_exit_reference(
    hidden: Float32Array, final_norm: Float32Array, lm_head: Float32Array, candidates: Int32Array, rms_norm_eps: float
) -> Float32Array:
    """Scores [num_rows, num_candidates] fp32: final RMSNorm of hidden rows, times the candidates' LM head rows.

    hidden [num_rows, hidden_size]; final_norm [hidden_size]; lm_head [vocab_size, hidden_size]; candidates
    [num_rows, num_candidates] token ids, -1 for none, which scores -inf.
    """
    x = hidden.astype(np.float64)
    x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + rms_norm_eps)
    x *= final_norm
    scores = np.einsum("rh,rch->rc", x, lm_head[candidates].astype(np.float64))
    return np.where(candidates < 0, -np.inf, scores).astype(np.float32)
