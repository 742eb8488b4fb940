"""Experts of quantized checkpoints stand for the weights that were stored in them, under Qwen3's names."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.mxfp4 import mxfp4_values
from faser_trtllm.models.weights import Weights
from tests.models.gguf.opened import opened
from tests.support.fp8_writer import write_fp8
from tests.support.moe_checkpoints import make_moe_checkpoint
from tests.support.quantized_writer import write_quantized

PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERT = "model.layers.1.mlp.experts.2"


def make(directory: Path, family: str) -> Path:
    return make_moe_checkpoint(directory / "plain", family, num_experts=4, expert_size=48, dtype="float32")


def check(weights: Weights, family: str, exact: dict[str, np.ndarray]) -> None:
    module = "model.layers.1.mlp" if family == "qwen3_moe" else "model.layers.1.block_sparse_moe"
    np.testing.assert_array_equal(
        weights.float32("model.layers.1.mlp.gate.weight", (4, 64)), exact[f"{module}.gate.weight"]
    )
    for part, theirs in PARTS.items():
        stored = f"{part}_proj" if family == "qwen3_moe" else theirs
        values = exact[f"{module}.experts.2.{stored}.weight"]
        np.testing.assert_array_equal(weights.float32(f"{EXPERT}.{part}_proj.weight", values.shape), values)


@pytest.mark.parametrize("kind", ["compressed-tensors-channel", "modelopt", "qwen"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fp8(tmp_path: Path, family: str, kind: str) -> None:
    folder, exact = write_fp8(make(tmp_path, family), tmp_path / "q", kind)
    name = f"{EXPERT}.down_proj"
    with opened(folder) as found:
        weights = found.checkpoint.weights
        check(weights, family, exact)
        assert (weights.fp8_matrix(f"{name}.weight") is None) == (kind == "qwen")
        assert weights.input_scale(name) == (0.25 if kind == "modelopt" else None)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_awq_and_gptq(tmp_path: Path, family: str, method: str) -> None:
    folder, exact = write_quantized(make(tmp_path, family), tmp_path / "q", method)
    with opened(folder) as found:
        check(found.checkpoint.weights, family, exact)


def test_mxfp4_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16).repeat(250, 0)
    scales = np.arange(2, 252, dtype=np.uint8)[:, None, None].repeat(16, 1)
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=dtype)
        got = np.stack([mxfp4_values(*parts) for parts in zip(blocks, scales, strict=True)])
        np.testing.assert_array_equal(got, expected.float().numpy().transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3_moe", {"quant_method": "mxfp4"}), ("gpt_oss", {"quant_method": "gptq", "bits": 4, "group_size": 32})],
)
def test_quantizations_of_other_families_are_named(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    folder = make_moe_checkpoint(tmp_path, family, num_layers=1)
    change(folder, {"quantization_config": settings})
    sentence = "with this quantization_config is not supported: mxfp4 is supported only for GptOssForCausalLM"
    with pytest.raises(CheckpointError, match=sentence), opened(folder):
        pass


def test_experts_in_one_tensor_must_fit_the_configuration(tmp_path: Path) -> None:
    folder = make_moe_checkpoint(tmp_path, "gpt_oss", num_layers=1)
    tensors = load_file(folder / "model.safetensors")
    module = "model.layers.0.mlp.experts"
    bias, scales = tensors[f"{module}.gate_up_proj_bias"], tensors[f"{module}.down_proj_scales"]
    for name, values, sentence in (
        (
            "gate_up_proj_bias",
            bias[:7],
            r"shape \[7, 128\]; it must have 2 dimensions and 8 experts in the first",
        ),
        (
            "down_proj_scales",
            scales[:, :, :1],
            r"down_proj_scales \[8, 64, 1\] are no MXFP4 matrices in blocks of 32",
        ),
    ):
        save_file(tensors | {f"{module}.{name}": values.contiguous()}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=sentence), opened(folder):
            pass


@pytest.mark.parametrize("scale", [254, 255])  # infinite with larger numbers than 0.5, and NaN with any
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, scale: int) -> None:
    folder = make_moe_checkpoint(tmp_path, "gpt_oss", num_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5] = scale
    if scale == 255:
        tensors["model.layers.0.mlp.experts.down_proj_blocks"][3, 5] = 0x01
    save_file(tensors, folder / "model.safetensors")
    with opened(folder) as found, pytest.raises(CheckpointError, match="down_proj_blocks is not finite everywhere"):
        found.checkpoint.weights.bfloat16("model.layers.0.mlp.experts.3.down_proj.weight", (64, 64))


@pytest.mark.parametrize("storage", ["bf16", "mxfp4"])
def test_an_expert_is_read_alone(tmp_path: Path, storage: str) -> None:
    """Memory holds one expert in fp32, not the tensor with all of them."""
    folder = make_moe_checkpoint(tmp_path, "gpt_oss", num_experts=64, num_layers=1)
    if storage == "bf16":
        unpack(folder)
    name = "model.layers.0.mlp.experts.60.up_proj.weight"
    with opened(folder) as found:
        tracemalloc.start()
        values = found.checkpoint.weights.float32(name, (64, 64))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 * values.nbytes / 4


def change(folder: Path, changes: dict[str, Any]) -> None:
    data = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(data))


def unpack(folder: Path) -> None:
    """Store the experts of a gpt-oss in bf16, each [in, out], as transformers does."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(name).numpy(), tensors.pop(name.replace("_blocks", "_scales")).numpy()
        values = np.stack([mxfp4_values(*parts) for parts in zip(blocks, scales, strict=True)])
        tensors[name.removesuffix("_blocks")] = torch.from_numpy(values).transpose(1, 2).contiguous().bfloat16()
    save_file(tensors, folder / "model.safetensors")
    change(folder, {"quantization_config": None})
