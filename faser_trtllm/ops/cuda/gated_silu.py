"""gated_silu: the activation between an MLP's two products, for rows whose RMSNorm is applied after the first one."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Argument, Launcher
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.tensors import bits_of, expect, pointer_to, type_name

if TYPE_CHECKING:
    from torch import Tensor

NUM_THREADS = 512
_VECTOR = 8
_COLUMNS_PER_BLOCK = NUM_THREADS * _VECTOR
MAX_SCALED_COLUMNS = 8 * _COLUMNS_PER_BLOCK
"""The widest rows that launch_scaled() takes: one block holds a row."""


def launch(
    launcher: Launcher,
    gate_up: Tensor,
    hidden: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/gated_silu.py says what it writes to out [num_rows, inner].

    inner and hidden_size must be multiples of 8. The host reads only addresses, shapes and types of the tensors. Raises
    InvalidArgumentError if no kernel fits.
    """
    (num_rows, inner), dtype = out.shape, type_name("out", out, "bf16", "fp16")
    arguments = _arguments(gate_up, hidden, bias, eps, "out", out, dtype)
    expect("out", out, dtype, (num_rows, inner))
    blocks = (num_rows, -(-inner // _COLUMNS_PER_BLOCK), 1)
    if num_rows:
        launcher.launch(f"gated_silu_{dtype}", blocks, (NUM_THREADS, 1, 1), arguments)


def launch_scaled(
    launcher: Launcher,
    gate_up: Tensor,
    hidden: Tensor,
    bias: Tensor | None,
    eps: float,
    out: ScaledRows,
) -> None:
    """Write the bf16 result of launch() in e4m3, like quantize_rows(); inner is at most MAX_SCALED_COLUMNS."""
    num_rows, inner = out.values.shape
    if inner > MAX_SCALED_COLUMNS:
        raise InvalidArgumentError(f"out has rows of {inner}; at most {MAX_SCALED_COLUMNS} are quantized by one block")
    arguments = _arguments(gate_up, hidden, bias, eps, "out.values", out.values, "bf16")
    expect("out.values", out.values, "e4m3", (num_rows, inner))
    expect("out.scales", out.scales, "fp32", (num_rows, 1))
    arguments.append(pointer_to(out.scales))
    if num_rows:
        launcher.launch("gated_silu_e4m3", (num_rows, 1, 1), (NUM_THREADS, 1, 1), arguments)


def _arguments(
    gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float, name: str, out: Tensor, dtype: str
) -> list[Argument]:
    (num_rows, inner), hidden_size = out.shape, hidden.shape[-1]
    for each, size in ((name, inner), ("hidden", hidden_size)):
        if size % _VECTOR:
            raise InvalidArgumentError(f"{each} has rows of {size}; it must be a multiple of {_VECTOR}")
    expect("gate_up", gate_up, "fp32" if dtype == "fp16" else dtype, (num_rows, 2 * inner))
    expect("hidden", hidden, dtype, (num_rows, hidden_size))
    if bias is not None:
        expect("bias", bias, dtype, (2 * inner,))
    inputs = (gate_up, hidden, bias)
    arguments: list[Argument] = [pointer_to(each) for each in inputs]
    arguments += [ctypes.c_int32(value) for value in (num_rows, inner, hidden_size, bits_of(eps))]
    arguments.append(pointer_to(out))
    return arguments
