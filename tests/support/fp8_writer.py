"""Writes tiny fp8 checkpoints as compressed-tensors, ModelOpt, AutoFP8 and Qwen lay them out; e4m3 by torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.gguf_writer import read_float32
from tests.support.quantized_writer import MATRICES

E4M3_MAX = 448.0
BLOCK = (24, 40)  # leaves parts of blocks at the ends of matrices of 64
MODELOPT_BLOCK = (128, 128)
LINEAR: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
KINDS = (
    "compressed-tensors",
    "compressed-tensors-channel",
    "compressed-tensors-block",
    "modelopt",
    "modelopt-channel",
    "modelopt-block",
    "modelopt-own-file",
    "autofp8",
    "qwen",
)


def block_of(kind: str) -> tuple[int, int] | None:
    if kind == "modelopt-block":
        return MODELOPT_BLOCK
    return BLOCK if kind in ("compressed-tensors-block", "qwen") else None


def settings_of(kind: str) -> dict[str, Any]:
    """quantization_config, or what hf_quant_config.json calls quantization."""
    method, _, strategy = kind.removeprefix("compressed-").partition("-")
    if method == "tensors":
        weights = LINEAR | {"strategy": strategy or "tensor", "block_structure": list(BLOCK)}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
        settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
        return settings | {"config_groups": {"group_0": group}, "kv_cache_scheme": None}
    if method == "modelopt":
        algorithm = {"channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "fp8_pb_wo"}.get(strategy, "FP8")
        settings = {"quant_algo": algorithm, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
        return settings if strategy == "own-file" else settings | {"quant_method": "modelopt"}
    blocks = {"weight_block_size": list(BLOCK), "fmt": "e4m3"} if kind == "qwen" else {"activation_scheme": "static"}
    return {"quant_method": "fp8"} | blocks


def quantize(weight: np.ndarray, kind: str) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """[out, in] -> e4m3, scales in the layout's shape, and the fp32 weights that these stand for, number by number."""
    num_out, num_in = weight.shape
    height, width = block_of(kind) or ((1, num_in) if kind.endswith("channel") else (num_out, num_in))
    bits = torch.empty((num_out, num_in), dtype=torch.float8_e4m3fn)
    scales = np.zeros((-(-num_out // height), -(-num_in // width)), np.float32)
    exact = np.zeros_like(weight)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = scale = np.float32(np.abs(weight[part]).max() / E4M3_MAX)
            bits[part] = (torch.from_numpy(weight[part]) / float(scale)).to(torch.float8_e4m3fn)
            exact[part] = bits[part].float().numpy() * scale
    found = torch.from_numpy(scales)
    if kind == "modelopt-block":
        return bits, found[:, None, :, None].contiguous(), exact
    if block_of(kind) is None and not kind.endswith("channel"):
        found = found.reshape(()) if kind.startswith("modelopt") else found.reshape(1)
    return bits, found[:, 0] if kind == "modelopt-channel" else found, exact


def write_fp8(
    source: Path, directory: Path, kind: str, more: Mapping[str, torch.Tensor] | None = None, **changes: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """An fp8 copy of a checkpoint -> (its folder, the fp32 tensors that it stands for).

    changes: of the settings. more: further tensors, or others.
    """
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, np.ndarray] = {}
    for name, values in read_float32(source).items():
        module = name.removesuffix(".weight")
        if not module.endswith(MATRICES) or module == name:
            tensors[name], exact[name] = torch.from_numpy(values), values
            continue
        tensors[name], scales, exact[name] = quantize(values, kind)
        tensors[f"{name}_scale_inv" if kind == "qwen" else f"{name}_scale"] = scales.contiguous()
        if kind in ("autofp8", "modelopt"):
            tensors[f"{module}.input_scale"] = torch.tensor(0.25)
        if kind == "modelopt" and module.endswith("k_proj"):
            tensors[f"{module}.k_scale"] = torch.tensor(0.5)
    directory.mkdir()
    save_file(tensors | dict(more or {}), directory / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    data, settings = json.loads((source / "config.json").read_text()), settings_of(kind) | changes
    if kind == "modelopt-own-file":
        own = {"producer": {"name": "modelopt"}, "quantization": settings}
        (directory / "hf_quant_config.json").write_text(json.dumps(own))
    else:
        data["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(data))
    return directory, exact
