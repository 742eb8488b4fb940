"""Drafts that are held for doubtful where nothing is learnt of them, so that branches take rows wherever they may: toy
models are surer of their drafts than small real ones."""

from __future__ import annotations

from unittest.mock import patch

from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.requests import pick_branches


def doubtful_drafts():
    """A context, in which an executor is assembled."""
    return patch.object(pick_branches, "PRIOR", ((0.0, -2.0),) * NUM_MODES)
