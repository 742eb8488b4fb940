"""Passes padded to a bucket mean what they mean unpadded: dummy rows run through the networks and change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.tensorrt_buckets import Buckets
from faser_trtllm.engine.tensorrt_inputs import padded_inputs
from tests.builder.network.networks import load_trt, make_model, one_thread  # noqa: F401
from tests.engine.test_interpreter_plugins import PASSES, TOLERANCE, Whole

trt = load_trt()


class PaddedWhole(Whole):
    """Feeds what a GPU with graphs would be fed."""

    num_dummies = 0

    def _logits(self, batch: RaggedBatch) -> np.ndarray:
        flavour = self.segment.flavour
        padded = padded_inputs(batch, flavour, self.segment.options, Buckets(64), len(self.caches["k_cache_0"]))
        self.num_dummies += padded.sizes["rows"] - batch.num_rows
        feeds = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in padded.arrays.items()}
        return self.interpreter.run(feeds | self.caches)["logits"].numpy()[: batch.logit_rows.size]


@pytest.mark.parametrize(("case", "is_plugin"), [("mistral-window", False), ("qwen3", False), ("qwen3", True)])
def test_dummy_rows_change_nothing(tmp_path: Path, case: str, is_plugin: bool) -> None:
    """Among the passes are one with idle slots and one where every slot is busy."""
    model = make_model(tmp_path, case)
    plain, padded = Whole(model, is_plugin), PaddedWhole(model, is_plugin)
    for mine, theirs in zip(plain.run(PASSES), padded.run(PASSES), strict=True):
        assert np.abs(mine - theirs).max() < TOLERANCE
    assert padded.num_dummies > 0
