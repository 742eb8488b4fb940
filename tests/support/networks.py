"""Networks of tiny random checkpoints, and the module they are built with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork, build_segment, create_network, logger
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import LLAMA3_ROPE, YARN_ROPE, make_checkpoint

OPTIONS = NetworkOptions(
    dtype="float32", max_batch_size=4, max_num_tokens=64, max_seq_len=96, tokens_per_block=96, max_query_rows=64
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3": ("llama", {"tie": True, "rope": LLAMA3_ROPE}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-80-yarn": ("llama", {"head_dim": 80, "num_kv_heads": 1, "rope": YARN_ROPE}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("qwen2", {"rope": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie": True, "num_kv_heads": 1}),
}


def load_trt() -> Any:
    """tensorrt_rtx, or a skip that says what to install."""
    return pytest.importorskip("tensorrt_rtx", reason="needs pip install tensorrt_rtx_cu13==1.7.1.116")


def make_model(directory: Path, case: str, dtype: str = "float32") -> tuple[ModelConfig, CheckpointWeights]:
    """Four layers of a case."""
    architecture, changes = CASES[case]
    make_checkpoint(directory, architecture, num_layers=4, dtype=dtype, **changes)
    return load_model_config(directory), CheckpointWeights(directory)


def options(**changes: Any) -> NetworkOptions:
    return replace(OPTIONS, **changes)


def build(
    trt: Any, builder: Any, model: tuple[ModelConfig, CheckpointWeights], part: tuple[int, int] | None, **changes: Any
) -> SegmentNetwork:
    """The layers of a part, or the early exit for None."""
    network = create_network(trt, builder)
    if part is None:
        return build_early_exit(trt, network, *model, options(**changes))
    return build_segment(trt, network, *model, *part, options(**changes))


def new_builder(trt: Any) -> Any:
    return trt.Builder(logger(trt))
