"""Section "costs": the cost table of a pair, as policies read it (core/cost_table.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.pair import Pair, PairLimits, open_pair
from faser_trtllm.bench.gpu.probe import PairProbe
from faser_trtllm.core.cost_table import ALL, CostTable, Fingerprint
from faser_trtllm.profiling.grid import Limits, Point
from faser_trtllm.profiling.measure import Measured, measure_exits, measure_points, measure_segments

ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1280)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CATCH_UP_ROWS = (2, 8, 32, 128, 512)
HELD_OUT = ((3, 3), (20, 5), (40, 10), (100, 20), (224, 56), (300, 100), (700, 140))
SEGMENT_ROWS = ((1, 1), (8, 2), (32, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
EXIT_ROWS = (1, 16, 64, 256)
CONTEXT, DRY_CONTEXT = 256, 16
SECONDS_PER_FORM = 14.0


def run(bench: Bench) -> None:
    for form in bench.options.forms:
        if bench.left_s < SECONDS_PER_FORM and bench.machine.is_gpu:
            bench.record.error(f"the time was over before {form}")
            return
        bench.record.attempt(form, lambda form=form: _form(bench, form))  # type: ignore[misc]


def _form(bench: Bench, form: str) -> None:
    largest = max(bench.options.concurrency) if bench.machine.is_gpu else 2
    context = CONTEXT if bench.machine.is_gpu else DRY_CONTEXT
    limits = PairLimits(largest, context + 64, max(5 * largest, 1024 if bench.machine.is_gpu else 64))
    with open_pair(bench, form, limits) as pair:
        table = measure_table(bench, pair, context, SECONDS_PER_FORM if bench.machine.is_gpu else 0.1)
    table.save(bench.file(cost_file(form)))
    for kind, curve in (("verify", table.curves["verify@all"]), ("draft step", table.curves["draft_step@all"])):
        bench.record.table(
            f"{form}, {kind}",
            ("rows", "ms"),
            [(rows, f"{ms:.3f}") for rows, ms in zip(curve.rows, curve.ms, strict=True)],
            f"And {1e3 * curve.per_request_ms:.2f} us per request, {1e6 * curve.per_request_context_ms:.2f} ns per "
            "request and token of context.",
        )
    error = {kind: round(value, 4) for kind, value in table.error.items()}
    bench.record.value(f"error {form}", error)
    points = {
        label: dict(zip(curve.rows, curve.ms, strict=True))
        for label, curve in (("verify", table.curves["verify@all"]), ("draft step", table.curves["draft_step@all"]))
    }
    bench.record.plot(
        f"{form}: ms by rows", "rows", "ms", {k: {float(n): t for n, t in p.items()} for k, p in points.items()}
    )


def cost_file(form: str) -> str:
    """The table's file in the output folder."""
    return f"cost_table_{form}.json"


def measure_table(bench: Bench, pair: Pair, context_len: int, budget_s: float) -> CostTable:
    """Measure what policies ask for; samples that no fit sees give the error."""
    probe = PairProbe(pair, context_len)
    probe.fill()
    limits = probe.limits
    found: Measured = measure_points(probe, list(points(limits)), budget_s, min_rounds=2)
    samples = list(found.samples)
    shapes = [(rows, requests) for rows, requests in SEGMENT_ROWS if limits.fits(rows, requests)]
    samples += measure_segments(probe, shapes, 2, limits.max_context)
    samples += measure_exits(probe, [n for n in EXIT_ROWS if n <= limits.max_rows], 2)
    device = str(bench.found_before("environment", "device") or bench.machine.device)
    what = f"{pair.form} of {bench.options.checkpoint_dir.name}, seed {bench.options.seed}"
    engine = hashlib.sha256(what.encode()).hexdigest()
    fingerprint = Fingerprint(device, "cuda" if bench.machine.is_gpu else "dry run", bench.machine.num_sms, engine)
    return CostTable.fit(samples, fingerprint, held_out=found.held_out)


def points(limits: Limits) -> Iterator[Point]:
    """Target passes by rows with the fewest and the most requests; draft steps; catch-up rows."""
    context = limits.max_context
    for num_rows in ROWS:
        fitting = [r for r in REQUESTS if limits.fits(num_rows, r)]
        for num_requests in dict.fromkeys(fitting[:1] + fitting[-1:]):
            yield Point("verify", ALL, num_rows, num_requests, context)
    for num_requests in REQUESTS:
        if num_requests <= limits.max_num_requests:
            yield Point("draft_step", ALL, num_requests, num_requests, context)
            yield Point("verify", ALL, num_requests, num_requests, max(1, context // 4))
    for num_rows in CATCH_UP_ROWS:
        if num_rows // 2 <= limits.max_num_requests and num_rows <= limits.max_rows:
            yield Point("draft_rows", ALL, num_rows, num_rows // 2, context)
    for num_rows, num_requests in HELD_OUT:
        if limits.fits(num_rows, num_requests):
            yield Point("verify", ALL, num_rows, num_requests, context * 3 // 4, held_out=True)
