"""Section "kernels": every kernel of plugins/cuda against its reference, its roofline and torch's attention."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import acceptance, attention, drafting, expected, layers, pruning
from benchmarks.gpu.kernels.case import KernelCase, KernelResult, measure_case
from faser_trtllm.ops.cuda.driver import device_arch
from lab.costmodel.gpu import find_gpu

FAMILIES: dict[str, Callable[[Bench], Iterator[KernelCase]]] = {
    "verify_attention": attention.attention_cases,
    "append_kv": attention.append_cases,
    "accept": acceptance.accept_cases,
    "early_exit": pruning.early_exit_cases,
    "compact_rows": pruning.compact_rows_cases,
    "prune_rows": pruning.prune_rows_cases,
    "quantize_rows": layers.quantize_rows_cases,
    "gated_silu": layers.gated_silu_cases,
    "matmul": layers.matmul_cases,
    "route_rows": layers.route_cases,
    "grouped_matmul": layers.grouped_matmul_cases,
    "clamped_swiglu": layers.swiglu_cases,
    "combine_rows": layers.combine_cases,
    "sample": drafting.sample_cases,
    "take_step": drafting.take_step_cases,
    "copy_kv": drafting.copy_kv_cases,
}
HEAD_DIMS = (128, 64)  # of the forms


def run(bench: Bench) -> None:
    """Check and time all kernels; one that does not compile or is wrong is an error, and the next one runs."""
    start = time.monotonic()
    heads = [{"FASER_HEAD_DIM": size} for size in HEAD_DIMS]
    bench.machine.compile([*(("verify_attention", size) for size in heads), *((op, None) for op in list(FAMILIES)[1:])])
    bench.record.value("compile_s", round(time.monotonic() - start, 1))
    times = bench.record.attempt("modeled times", lambda: _modeled_us(bench)) if bench.machine.is_gpu else None
    for op, cases in FAMILIES.items():
        bench.record.attempt(op, lambda op=op, cases=cases: _family(bench, op, cases, times or {}))  # type: ignore[misc]
        if bench.left_s < 0:
            bench.record.error(f"the time was over after {op}")
            return


def _modeled_us(bench: Bench) -> expected.Times:
    """Return the model's times of all cases on this GPU, with the bandwidth that the section "environment" found."""
    ceilings = bench.ceilings()
    gpu = dataclasses.replace(
        find_gpu("h100"),
        num_sms=bench.machine.num_sms,
        gb_per_ms=1e-12 * ceilings.bytes_per_s,
        tflops=1e-12 * ceilings.flops_per_s,
    )
    cases = expected.recorded(bench.options, FAMILIES, gpu.num_sms)
    try:
        return expected.times_of(cases, gpu, device_arch())
    except ValueError as error:
        bench.record.note(f"no modeled times: {error}")
        return {}


def _family(
    bench: Bench, op: str, cases: Callable[[Bench], Iterator[KernelCase]], times: expected.Times | None = None
) -> None:
    results: list[KernelResult] = []
    for case in cases(bench):
        result = bench.record.attempt(f"{op} {case.shape}", lambda case=case: measure_case(bench, case))  # type: ignore[misc]
        if result is None:
            continue
        results.append(result)
        if result.error > 1.0:
            bench.record.error(f"{op} {case.shape} is WRONG: {result.error:.2g} times the error allowed")
        _write(bench, op, results, times or {})
        if bench.left_s < 0:
            break


def _write(bench: Bench, op: str, results: list[KernelResult], times: expected.Times) -> None:
    rows = []
    for r in results:
        share, modeled_us = r.roofline_share, times.get((op, r.shape))
        rows.append(
            (
                r.shape,
                f"{r.error:.2g}",
                None if r.ms is None else f"{1e3 * r.ms:.1f}",
                None if modeled_us is None else f"{modeled_us:.1f}",
                f"{1e3 * r.floor_ms:.1f}",
                None if share is None else f"{100 * share:.0f}%",
                None if r.peer_ms is None else f"{1e3 * r.peer_ms:.1f}",
            )
        )
    note = "error: 1 is the most allowed (exact kernels: 0 or inf)."
    if op == "verify_attention":
        note += " torch: scaled_dot_product_attention over a cache in one piece."
    if not bench.machine.is_gpu:
        note += " Dry run: without a time the reference ran in the kernel's place."
    header = ("shape", "error", "us", "modeled us", "roofline us", "of roofline", "torch us")
    bench.record.table(op, header, rows, note)
    bench.record.value(
        op,
        [
            {"shape": r.shape, "error": r.error, "ms": r.ms, "floor_ms": r.floor_ms, "peer_ms": r.peer_ms}
            | {"modeled_us": times.get((op, r.shape))}
            for r in results
        ],
    )
