"""Writes tiny AWQ and GPTQ checkpoints, one integer at a time after the layouts that AutoAWQ and AutoGPTQ document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.gguf_writer import read_float32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", ".w1", ".w2", ".w3")


def int32_words(values: list[int], bits: int, order: tuple[int, ...]) -> int:
    """One word: place i, from the lowest bits up, holds values[order[i]]; as a signed int32."""
    word = 0
    for place, index in enumerate(order):
        word |= values[index] << (bits * place)
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_columns(values: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """[rows, n] integers -> int32 [rows, n / per word]."""
    per_word = 32 // bits
    rows = [
        [int32_words(row[at : at + per_word], bits, order) for at in range(0, len(row), per_word)]
        for row in values.tolist()
    ]
    return np.array(rows, np.int32)


def quantize(
    weight: np.ndarray, bits: int, groups: np.ndarray, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[out, in] -> integers [in, out], zero points and fp16 scales [groups, out], and their fp32 weights."""
    num_groups, top = int(groups.max()) + 1, (1 << bits) - 1
    zeros = np.zeros((num_groups, len(weight)), np.int64)
    scales = np.zeros((num_groups, len(weight)), np.float16)
    quants = np.zeros((weight.shape[1], len(weight)), np.int64)
    exact = np.zeros_like(weight)
    for out in range(len(weight)):
        for group in range(num_groups):
            inputs = np.flatnonzero(groups == group)
            values = weight[out, inputs].astype(float)
            low, high = min(values.min(), 0), max(values.max(), 0)
            if symmetric:
                high = max(-low, high)
                low = -high
            scale = np.float16((high - low) / top)
            zero = (1 << (bits - 1)) if symmetric else min(max(round(-low / float(scale)), 0), top)
            q = np.clip(np.round(values / float(scale)) + zero, 0, top).astype(np.int64)
            quants[inputs, out], zeros[group, out], scales[group, out] = q, zero, scale
            exact[out, inputs] = (q - zero) * float(scale)
    return quants, zeros, scales, exact


def write_quantized(
    source: Path,
    directory: Path,
    method: str,
    bits: int = 4,
    group_size: int = 16,
    symmetric: bool = False,
    desc_act: bool = False,
    v2: bool = False,
    more: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> tuple[Path, dict[str, np.ndarray]]:
    """A quantized copy of a checkpoint -> (its folder, the fp32 tensors that it stands for).

    config: further keys of quantization_config. more: further tensors.
    """
    tensors: dict[str, np.ndarray] = {}
    exact: dict[str, np.ndarray] = {}
    random = np.random.default_rng(0)
    for name, values in read_float32(source).items():
        module = name.removesuffix(".weight")
        if not module.endswith(MATRICES) or module == name:
            tensors[name] = exact[name] = values
            continue
        values[::9] = np.abs(values[::9])  # zero points of 0
        size = values.shape[1] if group_size == -1 else group_size
        groups = np.arange(values.shape[1]) // size
        if desc_act:
            groups = random.permutation(groups)
        quants, zeros, scales, exact[name] = quantize(values, bits, groups, symmetric)
        in_order = tuple(range(32 // bits))
        if method == "awq":
            tensors[f"{module}.qweight"] = pack_columns(quants, bits, AWQ_ORDER)
            tensors[f"{module}.qzeros"] = pack_columns(zeros, bits, AWQ_ORDER)
        else:
            tensors[f"{module}.qweight"] = np.ascontiguousarray(pack_columns(quants.T, bits, in_order).T)
            words = pack_columns(zeros, bits, in_order)
            # GPTQModel writes the first format so, from the second: with borrows within a word.
            tensors[f"{module}.qzeros"] = words if v2 else words - np.int32(0x11111111 if bits == 4 else 0x01010101)
            tensors[f"{module}.g_idx"] = groups.astype(np.int32)
        tensors[f"{module}.scales"] = scales
    directory.mkdir()
    save_file(tensors | dict(more or {}), directory / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    data = json.loads((source / "config.json").read_text())
    settings: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group_size}
    if method == "awq":
        settings |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    else:
        settings |= {"desc_act": desc_act, "sym": symmetric, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    data["quantization_config"] = settings | config
    (directory / "config.json").write_text(json.dumps(data))
    return directory, exact
