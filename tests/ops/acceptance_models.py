"""Acceptance models with slots whose drafts they judge."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.acceptance import AcceptanceModel
from tests.support.sampling_slots import Slots


def model_and_slots(rng, n, k, *, tie=False):
    """Return a model of k places, n slots and margins [n, 16] for the caller to keep: random, or many of them equal."""
    model = AcceptanceModel(k)
    model.slope[:] = 1.0 if tie else rng.random((NUM_MODES, k))
    model.intercept[:] = 0.0 if tie else rng.standard_normal((NUM_MODES, k))
    slots = Slots(n, 4, k)
    margins = (rng.integers(0, 3, (n, 16)) if tie else rng.exponential(5.0, (n, 16))).astype(np.float32)
    slots.array["draft_margins"] = [row.ctypes.data for row in margins]
    certain = rng.random((n, 16)) < 0.3
    slots.draft_sources[:, :16] = np.where(certain, native.BY_SUFFIX, native.BY_MODEL)
    margins[certain] -= np.float32(3.0)  # log-odds, either side of 0
    slots.array["mode"] = rng.integers(0, NUM_MODES, n)
    return model, slots, margins
