"""combine_rows: add to each row the weighted outputs of its experts, in a fixed order."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.experts.route_rows import Routes
from faser_trtllm.ops.cuda.tensors import expect, pointer_to

if TYPE_CHECKING:
    from torch import Tensor

STEM = "combine_rows"
NUM_THREADS = 128
_VECTOR = 8
_COLUMNS_PER_BLOCK = NUM_THREADS * _VECTOR


def launch(
    launcher: Launcher,
    outputs: Tensor,
    routes: Routes,
    bias: Tensor | None,
    shared: Tensor | None,
    num_used: Tensor,
    hidden: Tensor,
) -> None:
    """Launch the kernel, asynchronously. lab/reference/cuda/experts/combine_rows.py says what it computes.

    Rows are bf16, of a multiple of 8 columns. The host reads only addresses, shapes and types of the tensors. Raises
    InvalidArgumentError if no kernel fits.
    """
    (num_rows, width), top_k, num_experts = hidden.shape, routes.places.shape[1], routes.ends.shape[0]
    if width % _VECTOR:
        raise InvalidArgumentError(f"hidden has rows of {width}; it must be a multiple of {_VECTOR}")
    expect("hidden", hidden, "bf16", (num_rows, width))
    expect("outputs", outputs, "bf16", (num_rows * top_k, width))
    expect("weights", routes.weights, "fp32", (num_rows, top_k))
    expect("places", routes.places, "int32", (num_rows, top_k))
    expect("experts", routes.experts, "int32", (num_rows, top_k))
    expect("logits", routes.logits, "fp32", (num_rows, None))
    expect("num_used", num_used, "int32", (1,))
    if bias is not None:
        expect("bias", bias, "bf16", (num_experts, width))
    if shared is not None:
        expect("shared", shared, "bf16", (num_rows, width))
    tensors = (outputs, routes.weights, routes.places, shared, routes.logits, bias, routes.experts, num_used)
    numbers = (num_rows, num_rows * top_k, top_k, width, routes.logits.shape[1], num_experts)
    arguments = (*map(pointer_to, tensors), *map(ctypes.c_int32, numbers), pointer_to(hidden))
    if num_rows:
        blocks = (num_rows, -(-width // _COLUMNS_PER_BLOCK), 1)
        launcher.launch("combine_rows", blocks, (NUM_THREADS, 1, 1), arguments)
