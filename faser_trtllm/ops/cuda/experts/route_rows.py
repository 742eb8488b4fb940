"""route_rows: choose the experts of each row of a mixture, and sort the pairs of row and expert by expert."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import expect, pointer_to

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STEM = "route_rows"
NUM_THREADS = 256
NUM_WARPS = NUM_THREADS // 32
ROW_TILE = 8
MAX_EXPERTS = 512
_VECTOR = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """How a row chooses experts: the top_k of num_experts with the largest logits; ties go to the lowest index."""

    num_experts: int
    top_k: int
    over_all: bool  # weights are from a softmax over all experts, not only the chosen ones


@dataclass(frozen=True, slots=True)
class Routes:
    """The result for n rows. Entries of dummy rows are not written."""

    logits: Tensor  # fp32 [n, num_outputs]: of the experts, then of the router's other outputs
    experts: Tensor  # int32 [n, top_k], ascending
    weights: Tensor  # fp32 [n, top_k]
    places: Tensor  # int32 [n, top_k]: indices of the row's pairs in `rows`
    rows: Tensor  # int32 [n * top_k]: the row of each pair, by expert and then by row; 0 after the last pair
    ends: Tensor  # int32 [num_experts]: the number of pairs up to and including each expert
    counts: Tensor  # int32 [num_experts], scratch
    num_distinct: Tensor  # int32 [1]: experts that have pairs, summed over the layers of a pass

    @classmethod
    def of(cls, num_rows: int, num_outputs: int, choice: Choice, device: torch.device) -> Routes:
        """Allocate memory for this many rows."""
        import torch

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        num_experts, top_k = choice.num_experts, choice.top_k
        return cls(
            logits=floats(num_rows, num_outputs),
            experts=integers(num_rows, top_k),
            weights=floats(num_rows, top_k),
            places=integers(num_rows, top_k),
            rows=integers(num_rows * top_k),
            ends=integers(num_experts),
            counts=integers(num_experts),
            num_distinct=integers(1),
        )

    def first(self, num_rows: int) -> Routes:
        """Return views of the first num_rows rows."""
        return Routes(
            self.logits[:num_rows],
            self.experts[:num_rows],
            self.weights[:num_rows],
            self.places[:num_rows],
            self.rows[: num_rows * self.places.shape[1]],
            self.ends,
            self.counts,
            self.num_distinct,
        )


def launch(
    launcher: Launcher,
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    num_used: Tensor,
    choice: Choice,
    is_first: bool,
    routes: Routes,
) -> None:
    """Launch the three kernels, asynchronously. lab/reference/cuda/experts/route_rows.py says what they compute.

    num_experts is at most 512 and width a multiple of 8. The host reads only addresses, shapes and types of the
    tensors. Raises InvalidArgumentError if no kernel fits.
    """
    (num_rows, width), num_outputs = x.shape, router.shape[0]
    num_experts, top_k = choice.num_experts, choice.top_k
    if not 1 <= top_k <= num_experts <= MAX_EXPERTS:
        raise InvalidArgumentError(
            f"top_k is {top_k} of {num_experts} experts; it must be 1 to their number, at most {MAX_EXPERTS}"
        )
    if width % _VECTOR or num_outputs < num_experts:
        raise InvalidArgumentError(
            f"router is {num_outputs} x {width}; it must have a row for each of {num_experts} experts, of a multiple "
            f"of {_VECTOR} inputs"
        )
    expect("x", x, "bf16", (num_rows, width))
    expect("router", router, "bf16", (num_outputs, width))
    if bias is not None:
        expect("bias", bias, "bf16", (num_outputs,))
    expect("num_used", num_used, "int32", (1,))
    expect("logits", routes.logits, "fp32", (num_rows, num_outputs))
    expect("experts", routes.experts, "int32", (num_rows, top_k))
    expect("weights", routes.weights, "fp32", (num_rows, top_k))
    expect("places", routes.places, "int32", (num_rows, top_k))
    expect("rows", routes.rows, "int32", (num_rows * top_k,))
    for name in ("ends", "counts"):
        expect(name, getattr(routes, name), "int32", (num_experts,))
    expect("num_distinct", routes.num_distinct, "int32", (1,))
    if not num_rows:
        return
    logits, used, counts, experts, distinct = map(
        pointer_to, (routes.logits, num_used, routes.counts, routes.experts, routes.num_distinct)
    )
    numbers = map(ctypes.c_int32, (num_rows, num_experts, num_outputs, width, is_first))
    grid = (-(-num_outputs // NUM_WARPS), -(-num_rows // ROW_TILE), 1)
    matrix = (pointer_to(x), pointer_to(router), pointer_to(bias), used)
    launcher.launch("route_rows_logits", grid, (NUM_THREADS, 1, 1), (*matrix, *numbers, logits, counts, distinct))
    numbers = map(ctypes.c_int32, (num_rows, num_experts, num_outputs, top_k, choice.over_all))
    grid = (-(-num_rows // NUM_WARPS), 1, 1)
    outputs = (counts, experts, pointer_to(routes.weights))
    launcher.launch("route_rows_choose", grid, (NUM_THREADS, 1, 1), (logits, used, *numbers, *outputs))
    numbers = map(ctypes.c_int32, (num_rows, num_experts, top_k))
    outputs = (pointer_to(routes.rows), pointer_to(routes.places), pointer_to(routes.ends))
    inputs = (counts, experts, used)
    launcher.launch(
        "route_rows_sort", (num_experts, 1, 1), (NUM_THREADS, 1, 1), (*inputs, *numbers, *outputs, distinct)
    )
