"""Section "claims": what earlier sections measured of whole passes, a draft step and acceptance, next to the goals."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.steps import CONTEXTS
from benchmarks.gpu.kernels.attention import PASS_CONTEXT
from benchmarks.gpu.kernels.passes import CLAIMS, Claim

FORM = "8B"
assert PASS_CONTEXT in CONTEXTS


def run(bench: Bench) -> None:
    """Write a row for each claim; nothing is measured here."""
    times = {
        (op, found["shape"]): found["modeled_us"]
        for op in {op for claim in CLAIMS for op, _ in claim.cases}
        for found in bench.found_before("kernels", op) or ()
        if found["modeled_us"] is not None
    }
    gpu = "h200" if "H200" in (bench.found_before("environment", "device") or "") else "h100"
    rows = []
    for claim in CLAIMS:
        modeled_ms = claim.modeled_ms(times, gpu) if times.keys() >= set(claim.cases) else None
        cells = [measured_ms(bench, claim), modeled_ms, claim.measured_ms(gpu)]
        rows.append((claim.name, claim.goal_ms, *(None if ms is None else f"{ms:.2f}" for ms in cells)))
    header = ("what", "goal ms", "measured ms", "modeled ms", "2026-11-26 ms")
    note = (
        f"Goals: of an H100. Modeled: our kernels; everything else as on the {gpu.upper()} of 2026-11-26, whose time "
        "comes last. Passes: section steps; a draft step, of the first form: breakdown; acceptance: kernels."
    )
    bench.record.table("Claims", header, rows, note)


def measured_ms(bench: Bench, claim: Claim) -> float | None:
    """Return what an earlier section of this folder measured, or None."""
    n, rows = claim.num_requests, claim.num_rows
    if claim.model == "accept":
        found = {one["shape"]: one["ms"] for one in bench.found_before("kernels", "accept") or ()}
        return found.get(claim.cases[0][1])
    if claim.model == "draft":
        by_context = bench.found_before("breakdown", f"wall ms, draft_step {n * rows} {n}") or {}
        ms: float | None = by_context.get(str(PASS_CONTEXT))
        return ms
    steps = [
        step
        for step in bench.found_before("steps", "steps") or ()
        if (step["batch_size"], step["rows_each"], step["context"]) == (n, rows, PASS_CONTEXT)
    ]
    steps.sort(key=lambda step: step["form"] != FORM)  # the goals' vocabulary first
    return steps[0]["ms"] if steps else None
