"""Passes padded to a bucket mean what they mean unpadded: dummy rows run through the networks and change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.buckets import Buckets
from faser_trtllm.engine.gpu.batch import DeviceBatch
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.tensorrt.linear_batch import LinearBatch
from tests.lab.interpreted.whole_network import MAX_SEQ_LEN, PASSES, SLOTS, TOLERANCE, Whole
from tests.support.networks import load_trt, make_model

trt = load_trt()


class PaddedWhole(Whole):
    """Feeds what a GPU with graphs would be fed."""

    num_dummies = 0

    def __init__(self, model, is_plugin: bool) -> None:
        super().__init__(model, is_plugin)
        options = self.segment.options
        num_blocks = len(self.caches["k_cache_0"])
        limits = GpuLimits(num_blocks, options.tokens_per_block, SLOTS, 64, MAX_SEQ_LEN, 64)
        spec = limits.spec({"vocab_size": 320, "num_layers": 1, "max_seq_len": MAX_SEQ_LEN}, (0, 1))
        runtime = HostRuntime()
        self.inputs = DeviceBatch(runtime, spec) if is_plugin else LinearBatch(runtime, spec, options)

    def _logits(self, batch: RaggedBatch) -> np.ndarray:
        inputs, rows = self.inputs, Buckets(64).rows(batch.num_rows)
        query_rows = min(rows, self.segment.options.max_query_rows)
        self.num_dummies += rows - batch.num_rows
        inputs.upload(batch, rows, query_rows)
        feeds = {name: getattr(inputs, name)[:rows] for name in ("token_ids", "positions", "logit_rows")}
        feeds |= {"cu_q_lens": inputs.cu_q_lens, "kv_lens": inputs.kv_lens}
        if isinstance(inputs, DeviceBatch):
            feeds["block_table"] = inputs.block_table
        else:
            feeds |= {"write_idx": inputs.write_idx, "unpad_idx": inputs.unpad_idx[:rows]}
            feeds["pad_idx"] = inputs.pad_idx(query_rows)
        return self.interpreter.run(feeds | self.caches)["logits"].numpy()[: batch.logit_rows.size]


@pytest.mark.parametrize(("case", "is_plugin"), [("mistral-window", False), ("qwen3", False), ("qwen3", True)])
def test_dummy_rows_change_nothing(tmp_path: Path, case: str, is_plugin: bool) -> None:
    """Among the passes are one with idle slots and one where every slot is busy."""
    model = make_model(tmp_path, case)
    plain, padded = Whole(model, is_plugin), PaddedWhole(model, is_plugin)
    for mine, theirs in zip(plain.run(PASSES), padded.run(PASSES), strict=True):
        assert np.abs(mine - theirs).max() < TOLERANCE
    assert padded.num_dummies > 0
