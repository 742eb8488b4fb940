"""clamped_swiglu: gpt-oss's activation between an expert's two products, of pairs that are sorted by expert."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import expect, pointer_to

if TYPE_CHECKING:
    from torch import Tensor

STEM = "clamped_swiglu"
NUM_THREADS = 256
_VECTOR = 8
_COLUMNS_PER_BLOCK = NUM_THREADS * _VECTOR


def launch(launcher: Launcher, gate_up: Tensor, bias: Tensor, ends: Tensor, out: Tensor) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/experts/clamped_swiglu.py says what it writes to out.

    Rows are bf16; out's are a multiple of 8 wide. The host reads only addresses, shapes and types of the tensors.
    Raises InvalidArgumentError if no kernel fits.
    """
    (num_pairs, inner), num_experts = out.shape, ends.shape[0]
    if inner % _VECTOR:
        raise InvalidArgumentError(f"out has rows of {inner}; it must be a multiple of {_VECTOR}")
    expect("gate_up", gate_up, "bf16", (num_pairs, 2 * inner))
    expect("bias", bias, "bf16", (num_experts, 2 * inner))
    expect("ends", ends, "int32", (num_experts,))
    expect("out", out, "bf16", (num_pairs, inner))
    numbers = map(ctypes.c_int32, (num_pairs, inner, num_experts))
    arguments = (*map(pointer_to, (gate_up, bias, ends)), *numbers, pointer_to(out))
    if num_pairs:
        blocks = (num_pairs, -(-inner // _COLUMNS_PER_BLOCK), 1)
        launcher.launch("clamped_swiglu", blocks, (NUM_THREADS, 1, 1), arguments)
