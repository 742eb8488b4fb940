"""Parse quantization_config, which says how the matrices of a quantized Hugging Face checkpoint are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.errors import CheckpointError

METHODS = ("awq", "gptq", "compressed-tensors", "modelopt", "fp8", "mxfp4")
_BITS = {"awq": (4,), "gptq": (4, 8)}
_MODELOPT_BLOCKS = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": (128, 128)}
_MAX_BLOCK = 1 << 20
_REMEDY = "take another checkpoint or the unquantized one"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """AWQ or GPTQ. group_size: number of inputs that share a scale, -1 for all. zero_offset: number to add to
    stored zero points, 1 in GPTQ's first format."""

    method: str
    bits: int
    group_size: int
    zero_offset: int = 0


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Matrices in e4m3. block: (outputs, inputs) that share a scale; None: one scale per matrix or per output."""

    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """MXFP4 experts of gpt-oss."""


Quantization = QuantizationConfig | Fp8Config | Mxfp4Config


def parse_quantization_config(data: Any, source: str = "config.json") -> Quantization:
    """Check and translate quantization_config; CheckpointError names source, field and supported values."""
    if not isinstance(data, dict):
        raise CheckpointError(f"{source}: quantization_config is {data!r:.80}; it must be an object")
    method: Any = data.get("quant_method")
    _check(source, "quant_method", method, METHODS)
    if method == "compressed-tensors":
        return _compressed_tensors(data, source)
    if method == "mxfp4":
        return Mxfp4Config()
    if method == "modelopt":
        algorithm: Any = data.get("quant_algo")
        algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm  # lower case in some versions
        _check(source, "quant_algo", algorithm, tuple(_MODELOPT_BLOCKS))
        return Fp8Config(_MODELOPT_BLOCKS[algorithm])
    if method == "fp8":
        _check(source, "fmt", data.get("fmt", "e4m3"), ("e4m3",))
        return Fp8Config(_block(data.get("weight_block_size"), source, "weight_block_size"))
    bits: Any = data.get("bits", data.get("w_bit"))
    group_size = data.get("group_size", data.get("q_group_size", 128))
    _check(source, "bits", bits, _BITS[method])
    if isinstance(group_size, bool) or not isinstance(group_size, int) or not (group_size > 0 or group_size == -1):
        raise CheckpointError(
            f"{source}: quantization_config.group_size is {group_size!r:.80}; it must be positive or -1"
        )
    if method == "awq":
        _check(source, "version", str(data.get("version", "gemm")).lower(), ("gemm",))
        _check(source, "zero_point", data.get("zero_point", True), (True,))
        return QuantizationConfig(method, bits, group_size)
    stored = data.get("checkpoint_format", "gptq")
    _check(source, "checkpoint_format", stored, ("gptq", "gptq_v2"))
    _check(source, "pack_dtype", data.get("pack_dtype", "int32"), ("int32",))
    _check(source, "dynamic", data.get("dynamic") or None, (None,))
    return QuantizationConfig(method, bits, group_size, zero_offset=1 if stored == "gptq" else 0)


def _compressed_tensors(data: Mapping[str, Any], source: str) -> Fp8Config:
    _check(source, "format", data.get("format"), ("float-quantized",))
    groups = data.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{source}: quantization_config.config_groups is {groups!r:.80}; it must name groups")
    blocks = set()
    for name, group in groups.items():
        at = f"config_groups.{name}.weights"
        scheme = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(scheme, Mapping):
            raise CheckpointError(f"{source}: quantization_config.{at} is {scheme!r:.80}; it must be an object")
        _check(source, f"{at}.type", scheme.get("type"), ("float",))
        _check(source, f"{at}.num_bits", scheme.get("num_bits"), (8,))
        _check(source, f"{at}.strategy", scheme.get("strategy"), ("tensor", "channel", "block"))
        is_block = scheme["strategy"] == "block"
        blocks.add(
            block := _block(scheme.get("block_structure") if is_block else None, source, f"{at}.block_structure")
        )
        if is_block and block is None:
            raise CheckpointError(f"{source}: quantization_config.{at}.block_structure is missing")
    if len(blocks) > 1:
        raise CheckpointError(f"{source}: quantization_config.config_groups mix blocks with other scales; {_REMEDY}")
    return Fp8Config(blocks.pop())


def _block(value: Any, source: str, field: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        num_out, num_in = (int(size) for size in sizes)
    except (TypeError, ValueError, OverflowError):
        num_out = num_in = 0
    if not 1 <= min(num_out, num_in) <= max(num_out, num_in) <= _MAX_BLOCK:
        raise CheckpointError(
            f"{source}: quantization_config.{field} is {value!r:.80}; it must be two sizes of 1 to {_MAX_BLOCK}"
        )
    return num_out, num_in


def _check(source: str, field: str, value: Any, read: tuple[Any, ...]) -> None:
    if isinstance(value, Mapping | list) or value not in read:
        raise CheckpointError(
            f"{source}: quantization_config.{field} is {value!r:.80}, supported: {' or '.join(map(str, read))}; "
            f"{_REMEDY}"
        )
