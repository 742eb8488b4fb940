"""Section "steps": decode and verification passes of the target against the time to read weights and caches."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.models.probe import PairProbe
from faser_trtllm.profiling.grid import Point

BATCH_SIZES, DRY_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2)
ROWS_EACH = (1, 5)  # decode, and a frontier of 4 drafts
CONTEXT, DRY_CONTEXT = 512, 24
NUM_RUNS, DRY_NUM_RUNS = 20, 2
NUM_FORMS = 2  # as many as fit the section's time


def run(bench: Bench) -> None:
    rows: list[dict[str, Any]] = []
    for form in bench.options.forms[: 1 if bench.is_dry else NUM_FORMS]:
        if bench.left_s < 10:
            bench.record.error(f"the time was over before {form}")
            return
        bench.record.attempt(form, lambda form=form: _form(bench, form, rows))  # type: ignore[misc]


def _form(bench: Bench, form: str, rows: list[dict[str, Any]]) -> None:
    dry = bench.is_dry
    sizes, context = (DRY_BATCH_SIZES, DRY_CONTEXT) if dry else (BATCH_SIZES, CONTEXT)
    limits = PairLimits(max(sizes), context + 32, max(64 if dry else 1024, max(sizes) * max(ROWS_EACH)))
    ceilings = bench.ceilings()
    with open_pair(bench, form, limits) as pair:
        probe = PairProbe(pair, context)
        probe.fill()
        for batch_size in sizes:
            for each in ROWS_EACH:
                work = probe.runner(Point("verify", "all", batch_size * each, batch_size, probe.limits.max_context))
                ms = time_step(work, DRY_NUM_RUNS if dry else NUM_RUNS)
                num_bytes = pair.step_bytes(batch_size, context)
                floor_ms = ceilings.floor_ms(num_bytes, pair.step_flops(batch_size * each, context))
                rows.append({"form": form, "batch_size": batch_size, "rows_each": each, "ms": ms, "floor_ms": floor_ms})
                _write(bench, rows)
        bench.record.value(f"described {form}", pair.describe())


def time_step(work: Any, num_runs: int) -> float:
    """Median over runs of a function that returns its milliseconds, after two warm-up runs."""
    for _ in range(2):
        work()
    return float(statistics.median(work() for _ in range(num_runs)))


def _write(bench: Bench, rows: list[dict[str, Any]]) -> None:
    bench.record.value("steps", rows)
    bench.record.table(
        "Target passes with their acceptance test, wall time",
        ("form", "requests", "rows each", "ms", "roofline ms", "of roofline"),
        [
            (r["form"], r["batch_size"], r["rows_each"], f"{r['ms']:.3f}", f"{r['floor_ms']:.3f}", _share(r))
            for r in rows
        ],
        f"Context {DRY_CONTEXT if bench.is_dry else CONTEXT}. Roofline: every weight and every cached token is "
        "read once, or the arithmetic, whichever takes longer. 1 row: decode; 5 rows: 4 drafts are verified.",
    )
    series: dict[str, dict[float, float]] = {}
    for r in rows:
        label = f"{r['form']}, {r['rows_each']} row(s)"
        series.setdefault(label, {})[r["batch_size"]] = r["floor_ms"] / r["ms"]
    bench.record.plot("Share of the roofline", "requests", "share", series)


def _share(row: dict[str, Any]) -> str:
    return f"{100 * row['floor_ms'] / row['ms']:.0f}%"
