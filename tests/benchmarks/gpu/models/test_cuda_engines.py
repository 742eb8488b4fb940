"""Weights generated in device memory."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu.models.cuda_engines import device_weights
from benchmarks.gpu.models.enlarge import DecoderShape, EnlargedWeights
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.weights import CheckpointWeights


def test_device_weights_are_those_of_a_file(tmp_path: Path, options: GpuBenchOptions) -> None:
    """Fused and named as the builder does."""
    from faser_trtllm.builder.cuda_engine import CudaBackend
    from faser_trtllm.builder.cuda_engine_file import CudaFile
    from faser_trtllm.builder.engine_dir import BuildConfig
    from faser_trtllm.builder.source import Source
    from faser_trtllm.engine.cuda.weights import DeviceWeights, LayerWeights

    config = load_model_config(options.checkpoint_dir)
    with CheckpointWeights(options.checkpoint_dir) as weights:
        made = EnlargedWeights(weights, config, DecoderShape(64, 80, 3, 4, 2, 64))
        source = Source("target", tmp_path, made.config, made, (0, 3))
        path = tmp_path / "rank0.engine"
        CudaBackend("bfloat16").write_engine(path, source, BuildConfig(2, 16, 40, 2, 32), None)
        with CudaFile.open(path) as file:
            wanted = DeviceWeights.load(file, torch.device("cpu"))
        found = device_weights(made, 40, torch.device("cpu"))
    assert dict(found.sizes) == dict(wanted.sizes)
    for name in ("embedding", "final_norm", "lm_head", "cos", "sin"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for left, right in zip(found.layers, wanted.layers, strict=True):
        for name in LayerWeights.__slots__:
            a, b = getattr(left, name), getattr(right, name)
            assert a is b is None or torch.equal(a, b), name
