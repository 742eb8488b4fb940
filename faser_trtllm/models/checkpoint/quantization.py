"""How the matrices of a quantised Hugging Face checkpoint are stored: quantization_config of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.errors import CheckpointError

METHODS = ("awq", "gptq")
_BITS = {"awq": (4,), "gptq": (4, 8)}
_REMEDY = "take another checkpoint or the unquantised one"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """method: awq or gptq. group_size: input columns that share a scale, -1 for all. zero_offset: what is added to the
    stored zero points: 1 in GPTQ's first format.
    """

    method: str
    bits: int
    group_size: int
    zero_offset: int = 0


def parse_quantization_config(data: Any, source: str = "config.json") -> QuantizationConfig:
    """Check and translate; CheckpointError names the field, the value and what is read."""
    if not isinstance(data, dict):
        raise CheckpointError(f"{source}: quantization_config is {data!r:.80}, it must be an object")
    method: Any = data.get("quant_method")
    _check(source, "quant_method", method, METHODS)
    bits: Any = data.get("bits", data.get("w_bit"))
    group_size = data.get("group_size", data.get("q_group_size", 128))
    _check(source, "bits", bits, _BITS[method])
    if isinstance(group_size, bool) or not isinstance(group_size, int) or not (group_size > 0 or group_size == -1):
        raise CheckpointError(
            f"{source}: quantization_config.group_size is {group_size!r:.80}, it must be positive or -1"
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


def _check(source: str, field: str, value: Any, read: tuple[Any, ...]) -> None:
    if isinstance(value, Mapping | list) or value not in read:
        raise CheckpointError(
            f"{source}: quantization_config.{field} is {value!r:.80}, read is {' or '.join(map(str, read))}; {_REMEDY}"
        )
