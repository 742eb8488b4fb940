"""Section "steps": decode and verification passes of the target compared with the time to read weights and caches."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.models.probe import PairProbe
from faser_trtllm.profiling.grid import Point

BATCH_SIZES, DRY_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2)
ROWS_EACH = (1, 5)  # decode, and verification of 4 drafts
# A block of attention walks up to 512 positions, including the pass's own rows, so 512 is just over one chunk.
CONTEXTS, DRY_CONTEXTS = (448, 512, 640), (24,)
DETERMINISTIC_SIZES = (1, 8, 32, 128)  # of batches that are run with and without the option
NUM_RUNS, DRY_NUM_RUNS = 20, 2
SECONDS_PER_FORM = 20.0


def run(bench: Bench) -> None:
    rows: list[dict[str, Any]] = []
    for form in bench.forms(SECONDS_PER_FORM):
        bench.record.attempt(form, lambda form=form: _form(bench, form, rows))  # type: ignore[misc]
    bench.record.attempt("deterministic", lambda: _deterministic(bench))


def _form(bench: Bench, form: str, rows: list[dict[str, Any]]) -> None:
    dry = bench.is_dry
    sizes, contexts = (DRY_BATCH_SIZES, DRY_CONTEXTS) if dry else (BATCH_SIZES, CONTEXTS)
    limits = PairLimits(max(sizes), max(contexts) + 32, max(64 if dry else 1024, max(sizes) * max(ROWS_EACH)))
    ceilings = bench.ceilings()
    with open_pair(bench, form, limits) as pair:
        probe = PairProbe(pair, max(contexts))
        probe.fill()
        bench.record.value(f"described {form}", pair.describe())
        for batch_size, each, context in itertools.product(sizes, ROWS_EACH, contexts):
            work = probe.runner(Point("verify", "all", batch_size * each, batch_size, context))
            ms = time_step(work, DRY_NUM_RUNS if dry else NUM_RUNS)
            num_bytes = pair.step_bytes(batch_size, context)
            floor_ms = ceilings.floor_ms(num_bytes, pair.step_flops(batch_size * each, context))
            found = {"form": form, "batch_size": batch_size, "rows_each": each, "context": context}
            rows.append(found | {"ms": ms, "floor_ms": floor_ms})
            _write(bench, rows)


def _deterministic(bench: Bench) -> None:
    """Time passes of the first form with and without deterministic products and attention."""
    dry, form = bench.is_dry, bench.options.forms[0]
    sizes, context = (DRY_BATCH_SIZES, DRY_CONTEXTS[0]) if dry else (DETERMINISTIC_SIZES, CONTEXTS[0])
    limits = PairLimits(max(sizes), context + 32, max(64 if dry else 1024, max(sizes) * max(ROWS_EACH)))
    times: dict[tuple[int, int], list[float]] = {}
    for deterministic in (False, True):
        with open_pair(bench, form, limits, deterministic=deterministic) as pair:
            probe = PairProbe(pair, context)
            probe.fill()
            for batch_size, each in itertools.product(sizes, ROWS_EACH):
                work = probe.runner(Point("verify", "all", batch_size * each, batch_size, context))
                ms = time_step(work, DRY_NUM_RUNS if dry else NUM_RUNS)
                times.setdefault((batch_size, each), []).append(ms)
    bench.record.table(
        f"{form}: target passes with and without `deterministic`",
        ("requests", "rows each", "ms", "deterministic ms", "ratio"),
        [(*key, f"{fast:.3f}", f"{slow:.3f}", f"{slow / fast:.2f}") for key, (fast, slow) in times.items()],
        f"Context {context}.",
    )


def time_step(work: Any, num_runs: int) -> float:
    """Return the median over runs of a function that returns its ms, after two warm-up runs."""
    for _ in range(2):
        work()
    return float(statistics.median(work() for _ in range(num_runs)))


def _write(bench: Bench, rows: list[dict[str, Any]]) -> None:
    bench.record.value("steps", rows)
    by_pass: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for r in rows:
        by_pass.setdefault((r["form"], r["batch_size"], r["rows_each"]), {})[r["context"]] = r
    contexts = list(dict.fromkeys(r["context"] for r in rows))
    bench.record.table(
        "Target passes with their acceptance test, wall time",
        ("form", "requests", "rows each", *(f"{context}: ms (roofline, share)" for context in contexts)),
        [(*key, *(_cell(found.get(context)) for context in contexts)) for key, found in by_pass.items()],
        "By tokens of context. Roofline: every weight and every cached token is read once, or the arithmetic, "
        "whichever takes longer. 1 row: decode; 5 rows: 4 drafts are verified.",
    )
    series: dict[str, dict[float, float]] = {}
    for r in rows:
        label = f"{r['form']}, {r['rows_each']} row(s), {r['context']}"
        series.setdefault(label, {})[r["batch_size"]] = r["floor_ms"] / r["ms"]
    bench.record.plot("Share of the roofline", "requests", "share", series)


def _cell(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    return f"{row['ms']:.3f} ({row['floor_ms']:.3f}, {100 * row['floor_ms'] / row['ms']:.0f}%)"
