"""Cases of the kernels between a layer's products, of deterministic products, and of mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.attention import BATCHES, DRAFT_HIDDEN, TARGET_HIDDEN
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.kernels.op_case import Functions, Source, op_case
from faser_trtllm.ops.cuda import gated_silu, quantize_rows
from faser_trtllm.ops.cuda.experts import clamped_swiglu, combine_rows, grouped_matmul, route_rows
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from faser_trtllm.ops.cuda.products import matmul
from lab.reference.cuda.experts.clamped_swiglu import clamped_swiglu_reference
from lab.reference.cuda.experts.combine_rows import combine_rows_reference
from lab.reference.cuda.experts.grouped_matmul import grouped_matmul_reference
from lab.reference.cuda.experts.route_rows import route_rows_reference
from lab.reference.cuda.gated_silu import gated_silu_reference
from lab.reference.cuda.products.matmul import matmul_reference

if TYPE_CHECKING:
    from torch import Tensor

TARGET_INNER, DRAFT_INNER = 14336, 4096
EPS = 1e-5
L2_TIME = 0.56  # of a byte from the L2 cache, in that of one from memory
GPT_OSS = (32, 4, 2880)  # experts, experts per row and size of an expert of gpt-oss-20b
MIXTURE = (128, 8, 2048)  # experts, experts per row and hidden size of Qwen3-30B-A3B


def gated_silu_cases(bench: Bench) -> Iterator[KernelCase]:
    for num_rows, inner, hidden_size in (
        ((3, 64, 64),)
        if bench.is_dry
        else (
            *((n * rows, TARGET_INNER, TARGET_HIDDEN) for n in BATCHES for rows in (1, 5)),
            *((n, DRAFT_INNER, DRAFT_HIDDEN) for n in BATCHES),
        )
    ):
        yield _silu_case(bench, num_rows, inner, hidden_size, is_scaled=False)
    for num_rows, inner, hidden_size in ((3, 64, 64),) if bench.is_dry else ((160, TARGET_INNER, TARGET_HIDDEN),):
        yield _silu_case(bench, num_rows, inner, hidden_size, is_scaled=True)


def silu_shape(num_rows: int, inner: int, hidden_size: int) -> str:
    """Return the shape's name in reports."""
    return f"{num_rows} rows of {inner}, hidden {hidden_size}"


def _silu_case(bench: Bench, num_rows: int, inner: int, hidden_size: int, *, is_scaled: bool) -> KernelCase:
    def make(source: Source) -> tuple[Any, ...]:
        out = source.scaled_rows(num_rows, inner) if is_scaled else source.noise(num_rows, inner)
        return (source.noise(num_rows, 2 * inner), source.noise(num_rows, hidden_size), None, EPS, out)

    def scaled_reference(gate_up: Tensor, hidden: Tensor, bias: None, eps: float, out: Any) -> None:
        whole = hidden.new_empty((num_rows, inner))
        gated_silu_reference(gate_up, hidden, bias, eps, whole)
        found = quantize_rows.quantize_rows(whole)
        out.values.copy_(found.values)
        out.scales.copy_(found.scales)

    functions: Functions = (gated_silu.launch, gated_silu_reference)
    if is_scaled:
        functions = (gated_silu.launch_scaled, scaled_reference)
    num_bytes = num_rows * ((5.0 if is_scaled else 6.0) * inner + 2.0 * hidden_size)
    shape = silu_shape(num_rows, inner, hidden_size) + (", to e4m3" if is_scaled else "")
    return op_case(bench, "gated_silu", shape, "gated_silu", functions, make, 1, num_bytes)


def matmul_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield products of the 8B's gate_up and down. The model takes each block's reads of rows and weights from L2."""
    import torch

    matrices = ((2 * TARGET_INNER, TARGET_HIDDEN), (TARGET_HIDDEN, TARGET_INNER))
    for num_rows, num_outs, width in (
        ((3, 40, 64),) if bench.is_dry else tuple((n, *matrix) for n in (1, 32, 160, 640) for matrix in matrices)
    ):

        def make(source: Source, n: int = num_rows, outs: int = num_outs, size: int = width) -> tuple[Any, ...]:
            return (source.noise(n, size), source.noise(outs, size), source.noise(n, outs))

        tile_rows = matmul.choose_tile_rows(num_rows, num_outs)
        tile_outs = matmul.TILES[tile_rows][0]
        num_blocks = -(-num_rows // tile_rows) * -(-num_outs // tile_outs)
        read = 2.0 * width * num_blocks * (tile_outs + min(num_rows, tile_rows))
        case = op_case(
            bench,
            "matmul",
            f"{num_rows} rows of {width}, {num_outs} outputs",
            "matmul",
            (matmul.launch, matmul_reference),
            make,
            1,
            2.0 * (num_rows * (width + num_outs) + num_outs * width),
            peer=lambda x, weight, out: torch.mm(x, weight.t(), out=out),
        )
        more_bytes = max(0.0, L2_TIME * read - case.num_bytes)
        yield dataclasses.replace(case, num_flops=2.0 * num_rows * num_outs * width, more_bytes=more_bytes)


def quantize_rows_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield cases of quantize_rows, and of add_quantize_rows with hidden rows to which the rows are added."""
    for num_rows, width in ((3, 64),) if bench.is_dry else ((1, 4096), (64, 4096), (64, 14336)):
        yield _quantize_case(bench, num_rows, width, is_added=False)
    for num_rows, width in ((3, 64),) if bench.is_dry else ((160, TARGET_HIDDEN),):
        yield _quantize_case(bench, num_rows, width, is_added=True)


def _quantize_case(bench: Bench, num_rows: int, width: int, *, is_added: bool) -> KernelCase:
    def make(source: Source) -> tuple[Any, ...]:
        rows = [source.noise(num_rows, width) for _ in range(2 if is_added else 1)]
        return (*rows, source.scaled_rows(num_rows, width))

    def reference(x: Tensor, *outputs: Any) -> None:
        *hidden, found = outputs
        wanted = quantize_rows.quantize_rows(hidden[0].add_(x) if hidden else x)
        found.values.copy_(wanted.values)
        found.scales.copy_(wanted.scales)

    functions: Functions = (quantize_rows.launch_add if is_added else quantize_rows.launch, reference)
    num_outputs, row_bytes, more = (2, 7.0, ", added to the hidden rows") if is_added else (1, 3.0, "")
    shape, num_bytes = f"{num_rows} rows of {width}{more}", row_bytes * num_rows * width
    peer = None if is_added else lambda x, _: quantize_rows.quantize_rows(x)
    return op_case(
        bench,
        "quantize_rows",
        shape,
        "quantize_rows",
        functions,
        make,
        num_outputs,
        num_bytes,
        peer=peer,
        is_exact=True,
    )


def route_cases(bench: Bench) -> Iterator[KernelCase]:
    num_experts, top_k, width = (8, 2, 64) if bench.is_dry else MIXTURE
    choice = Choice(num_experts, top_k, over_all=False)
    for num_rows in (3,) if bench.is_dry else (1, 32, 160, 640):

        def make(source: Source, n: int = num_rows) -> tuple[Any, ...]:
            import torch

            routes = Routes.of(n, num_experts, choice, torch.device(source.device))
            # Small integers, whose products have one sum in any order: the choice of experts is exact.
            x, router = ((source.integers(7, rows, width) - 3).bfloat16() for rows in (n, num_experts))
            return (x, router, None, source.host(np.full(1, n, np.int32)), choice, True, routes)

        num_bytes = 2.0 * width * (num_rows + num_experts) + 4.0 * num_rows * (2 * num_experts + 6 * top_k)
        shape = f"{num_rows} rows of {width}, {top_k} of {num_experts} experts"
        functions = (route_rows.launch, route_rows_reference)
        yield op_case(bench, "route_rows", shape, "route_rows", functions, make, 1, num_bytes)


def swiglu_cases(bench: Bench) -> Iterator[KernelCase]:
    num_experts, top_k, inner = (8, 2, 64) if bench.is_dry else GPT_OSS
    for num_rows in (3,) if bench.is_dry else (1, 32, 160, 640):

        def make(source: Source, n: int = num_rows * top_k) -> tuple[Any, ...]:
            ends = np.arange(1, num_experts + 1) * n // num_experts
            rows = (source.noise(n, 2 * inner), source.noise(num_experts, 2 * inner))
            return (*rows, source.host(ends.astype(np.int32)), source.noise(n, inner))

        shape = f"{num_rows} rows of {inner}, {top_k} of {num_experts} experts"
        functions = (clamped_swiglu.launch, clamped_swiglu_reference)
        num_biases = min(num_experts, num_rows * top_k)
        num_bytes = 2.0 * inner * (3 * num_rows * top_k + 2 * num_biases)
        yield op_case(bench, "clamped_swiglu", shape, "clamped_swiglu", functions, make, 1, num_bytes)


def grouped_matmul_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield the first product of the experts of Qwen3-30B-A3B and, in MXFP4, of gpt-oss-20b. Rows are spread evenly
    over all experts."""
    for is_mxfp4 in (False, True):
        num_experts, top_k, width, num_outs = (32, 4, 2880, 5760) if is_mxfp4 else (*MIXTURE, 1536)
        if bench.is_dry:
            num_experts, top_k, width, num_outs = 8, 2, 64, 64
        for num_rows in (3,) if bench.is_dry else (1, 32, 160, 640):
            yield _grouped_case(bench, num_rows * top_k, num_experts, num_outs, width, is_mxfp4)


def _grouped_case(
    bench: Bench, num_pairs: int, num_experts: int, num_outs: int, width: int, is_mxfp4: bool
) -> KernelCase:
    import torch

    def make(source: Source) -> tuple[Any, ...]:
        ends = np.arange(1, num_experts + 1) * num_pairs // num_experts
        weights: Any
        if is_mxfp4:
            blocks = source.integers(256, num_experts, num_outs, width // 2).to(torch.uint8)
            scales = source.integers(4, num_experts, num_outs, width // 32) + 118
            weights = grouped_matmul.Mxfp4Matrices(blocks, scales.to(torch.uint8))
        else:
            weights = source.noise(num_experts, num_outs, width)
        inputs = (source.noise(num_pairs, width), weights, source.host(ends.astype(np.int32)))
        return (*inputs, source.noise(num_pairs, num_outs))

    def by_torch(x: Tensor, weights: Tensor, ends: Tensor, out: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)

    bytes_per_weight = 17 / 32 if is_mxfp4 else 2.0
    num_read = min(num_experts, num_pairs) * num_outs * width
    case = op_case(
        bench,
        "grouped_matmul",
        f"{num_pairs} rows of {width}, {num_experts} x {num_outs} outputs{', MXFP4' if is_mxfp4 else ''}",
        "grouped_matmul",
        (grouped_matmul.launch, grouped_matmul_reference),
        make,
        1,
        2.0 * num_pairs * (width + num_outs) + bytes_per_weight * num_read,
        peer=None if is_mxfp4 else by_torch,
    )
    return dataclasses.replace(case, num_flops=2.0 * num_pairs * num_outs * width)


def combine_cases(bench: Bench) -> Iterator[KernelCase]:
    num_experts, top_k, width = (8, 2, 64) if bench.is_dry else MIXTURE
    choice = Choice(num_experts, top_k, over_all=False)
    for num_rows in (3,) if bench.is_dry else (1, 32, 160, 640):

        def make(source: Source, n: int = num_rows) -> tuple[Any, ...]:
            import torch

            routes = Routes.of(n, num_experts, choice, torch.device(source.device))
            places = source.host(np.arange(n * top_k, dtype=np.int32).reshape(n, top_k))
            weights = source.noise(n, top_k).float()
            routes = dataclasses.replace(routes, places=places, weights=weights)
            used = source.host(np.full(1, n, np.int32))
            return (source.noise(n * top_k, width), routes, None, None, used, source.noise(n, width))

        shape = f"{num_rows} rows of {width}, {top_k} experts each"
        functions = (combine_rows.launch, combine_rows_reference)
        yield op_case(
            bench, "combine_rows", shape, "combine_rows", functions, make, 1, 2.0 * num_rows * width * (top_k + 2)
        )
