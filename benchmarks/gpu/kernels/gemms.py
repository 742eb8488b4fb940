"""Section "gemms": torch's bf16 GEMMs with a model's matrices by rows, a lower bound for any step; and matmul's, whose
rows do not depend on their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.machine import num_copies
from benchmarks.gpu.models.enlarge import SHAPES, DecoderShape
from faser_trtllm.engine.gpu.ops import Ops

if TYPE_CHECKING:
    from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
DRY_ROWS = (1, 4)
DRY_SHAPE = DecoderShape(32, 48, 2, 2, 1, 16)


def run(bench: Bench) -> None:
    ceilings, dry = bench.ceilings(), bench.is_dry
    rows = DRY_ROWS if dry else ROWS
    times: dict[str, dict[float, float]] = {}
    shares: dict[str, dict[float, float]] = {}
    seen: set[DecoderShape] = set()
    for name in bench.options.forms:
        if SHAPES[name].layers in seen:  # a shape with a different vocabulary
            continue
        seen.add(SHAPES[name].layers)
        shape = DRY_SHAPE if dry else SHAPES[name]
        found = bench.record.attempt(f"{name} matrices", lambda s=shape: layer_times(bench, s, rows))  # type: ignore[misc]
        if found is None:
            continue
        measured, deterministic, parted = found
        if deterministic:
            bench.record.table(
                f"{name}: one layer's products by torch and by matmul",
                ("rows", "torch ms", "matmul ms", "torch's rows not as alone", "matmul's rows not as alone"),
                [(n, f"{measured[n]:.4f}", f"{deterministic[n]:.4f}", *parted[n]) for n in rows],
                "Of the first 32 rows of each matrix: those with other bits than a product of that row only.",
            )
            if any(by_matmul for _, by_matmul in parted.values()):
                bench.record.error(f"{name}: rows of matmul's have other bits than alone")
        weights = sum(out * width for out, width in matrices(shape))
        times[name] = {n: shape.num_layers * ms for n, ms in measured.items()}
        shares[name] = {n: ceilings.floor_ms(2 * weights, 2 * n * weights) / ms for n, ms in measured.items()}
        bench.record.value("pass_ms", {form: dict(values) for form, values in times.items()})
        bench.record.table(
            "Matrix products of one pass",
            ("rows", *(f"{form} ms (of roofline)" for form in times)),
            [(n, *(f"{times[form][n]:.3f} ({100 * shares[form][n]:.0f}%)" for form in times)) for n in rows],
            "Layers without the LM head, attention, norms and gaps between kernels.",
        )
        bench.record.plot("Matrix products: share of the roofline", "rows", "share", shares)


def matrices(shape: DecoderShape) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of one layer's fused matrices: qkv, o, gate and up, down."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [
        (q + 2 * kv, shape.hidden_size),
        (shape.hidden_size, q),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]


Times = dict[int, float]


def layer_times(
    bench: Bench, shape: DecoderShape, rows: tuple[int, ...]
) -> tuple[Times, Times, dict[int, tuple[int, int]]]:
    """Return ms of one layer's GEMMs by rows, on weights that are not in the L2 cache: by torch and by matmul, {} where
    its kernel does not run; and how many rows of each have other bits than alone."""
    import torch

    machine = bench.machine
    generator = machine.generator(bench.options.seed)
    launcher = machine.launcher("matmul")
    ops = None if launcher is None else Ops({"matmul": launcher.launcher}, launcher.stream, machine.num_sms, True)
    total, ours, parted = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0.0), dict.fromkeys(rows, (0, 0))
    for num_out, num_in in matrices(shape):
        copies = num_copies(2 * num_out * num_in, machine.l2_bytes)
        weights = [
            (torch.randn(num_out, num_in, generator=generator, device=machine.device) / math.sqrt(num_in)).bfloat16()
            for _ in range(copies)
        ]
        for n in rows:
            x = torch.randn(n, num_in, generator=generator, device=machine.device).bfloat16()
            out = torch.empty(n, num_out, dtype=torch.bfloat16, device=machine.device)

            def product(weight: torch.Tensor, x: torch.Tensor = x, out: torch.Tensor = out) -> Callable[[], object]:
                return lambda: torch.mm(x, weight.T, out=out)

            total[n] += machine.time_ms([product(weight) for weight in weights], 5)
            if ops is not None:
                ours[n] += machine.time_ms([lambda w=w, x=x: ops.linear(x, w) for w in weights], 5)  # type: ignore[misc]
                both = (lambda x, w=weights[0]: torch.mm(x, w.T), lambda x, w=weights[0]: ops.linear(x, w))
                by_torch, by_matmul = (rows_not_as_alone(multiply, x) for multiply in both)
                parted[n] = parted[n][0] + by_torch, parted[n][1] + by_matmul
    return total, {} if ops is None else ours, parted


def rows_not_as_alone(product: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return how many of the first 32 rows have other bits in product(x) than in a product of that row only."""
    together = product(x)
    return sum(not bool((product(x[i : i + 1])[0] == together[i]).all()) for i in range(min(len(x), 32)))
