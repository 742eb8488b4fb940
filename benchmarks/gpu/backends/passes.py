"""Times of passes and draft steps of a backend's engine directory, in a cost table for `price`."""

from __future__ import annotations

from benchmarks.gpu.backends.built import REFERENCE, engine_path
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.costs import CONTEXT, DRY_CONTEXT, measure_table
from benchmarks.gpu.models.pair import OpenPair
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.fingerprint import PROFILE

KINDS = {"verify": "target pass", "draft_step": "draft step"}


def time_passes(bench: Bench, pair: OpenPair) -> CostTable:
    """Measure, and write the table into the directory as `faser profile` does."""
    context_len = DRY_CONTEXT if bench.is_dry else CONTEXT
    table = measure_table(bench, pair, context_len)
    table.save(engine_path(bench, pair.name) / PROFILE)
    for kind, words in KINDS.items():
        curve = table.curves[f"{kind}@all"]
        rows_each = 1 + pair.limits.max_draft_len if kind == "verify" else 1
        ms = {str(n): curve.at(n, -(-n // rows_each), context_len) for n in curve.rows}
        bench.record.value(f"{kind} ms", ms)
        header = ["rows", f"{pair.name} ms"]
        rows: list[list[str | None]] = [[n, f"{value:.3f}"] for n, value in ms.items()]
        if pair.name != REFERENCE:
            header.append("cuda ms")
            before = bench.found_before(REFERENCE, f"{kind} ms") or {}
            for row in rows:
                row.append(f"{before[row[0]]:.3f}" if row[0] in before else None)
        bench.record.table(
            f"{words} of the trained pair",
            header,
            rows,
            "Wall time with rejection sampling or draws, by the probe of `faser profile`; few requests with many rows, "
            f"context {context_len}. A small model: mostly launches.",
        )
    return table
