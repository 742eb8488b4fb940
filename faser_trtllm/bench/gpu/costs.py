"""Section "costs": the cost table of a pair, as policies read it (core/cost_table.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.calibration import calibrated
from faser_trtllm.bench.gpu.cuda_engines import PairLimits
from faser_trtllm.bench.gpu.pair import Pair, open_pair
from faser_trtllm.bench.gpu.probe import PairProbe
from faser_trtllm.core.cost_table import ALL, CostTable, Fingerprint
from faser_trtllm.profiling.grid import Limits, Point
from faser_trtllm.profiling.measure import (
    Measured,
    measure_exits,
    measure_interference,
    measure_points,
    measure_segments,
)

CONTEXT, DRY_CONTEXT = 256, 16
MEASURING_S = 12.0  # of a form; building it and calibrating exits come on top
SECONDS_PER_FORM = 25.0


@dataclass(frozen=True)
class Grid:
    """Which passes are measured. rows x requests: target passes; held_out and segments: (rows, requests)."""

    rows: tuple[int, ...]
    requests: tuple[int, ...]
    lane_rows: tuple[int, ...]  # of the target beside a drafting draft
    catch_up_rows: tuple[int, ...]
    held_out: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, int], ...]
    exit_rows: tuple[int, ...]
    together: tuple[tuple[int, int], ...]  # requests drafted, rows verified at the same time


GRID = Grid(
    rows=(1, 2, 4, 8, 16, 17, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1280),
    requests=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    lane_rows=(1, 8, 32, 64, 128, 256, 512, 1024),
    catch_up_rows=(2, 8, 32, 128, 512),
    held_out=((3, 3), (20, 5), (40, 10), (100, 20), (224, 56), (300, 100), (700, 140)),
    segments=((1, 1), (8, 2), (32, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)),
    exit_rows=(1, 16, 64, 256),
    together=((1, 5), (16, 80), (64, 320)),
)
DRY_GRID = Grid((1, 2, 4), (1, 2), (1, 4), (2,), ((3, 1),), ((1, 1), (4, 2)), (1, 4), ((1, 2),))


def run(bench: Bench) -> None:
    for form in bench.options.forms if bench.machine.is_gpu else bench.options.forms[:1]:
        if bench.left_s < SECONDS_PER_FORM and bench.machine.is_gpu:
            bench.record.error(f"the time was over before {form}")
            return
        bench.record.attempt(form, lambda form=form: _form(bench, form))  # type: ignore[misc]


def _form(bench: Bench, form: str) -> None:
    largest = max(bench.options.concurrency) if bench.machine.is_gpu else 2
    context = CONTEXT if bench.machine.is_gpu else DRY_CONTEXT
    limits = PairLimits(largest, context + 64, max(5 * largest, 1024 if bench.machine.is_gpu else 64))
    with open_pair(bench, form, limits, overlap=True) as pair:
        table = measure_table(bench, pair, context, MEASURING_S if bench.machine.is_gpu else 0.1)
        table.save(bench.file(cost_file(form)))
        whole = bench.record.attempt(f"{form}, exits", lambda: calibrated(bench, pair, table))
    if whole is not None:
        whole.save(bench.file(cost_file(form)))
    for kind, curve in (("verify", table.curves["verify@all"]), ("draft step", table.curves["draft_step@all"])):
        bench.record.table(
            f"{form}, {kind}",
            ("rows", "ms"),
            [(rows, f"{ms:.3f}") for rows, ms in zip(curve.rows, curve.ms, strict=True)],
            f"And {1e3 * curve.per_request_ms:.2f} us per request, {1e6 * curve.per_request_context_ms:.2f} ns per "
            "request and token of context.",
        )
    for beside in table.interference:
        bench.record.table(
            f"{form}, both lanes at once",
            ("draft on", "verify on", "draft time over alone", "verify time over alone"),
            [
                (
                    beside.draft_partition,
                    beside.verify_partition,
                    f"{beside.draft_factor:.2f}",
                    f"{beside.verify_factor:.2f}",
                )
            ],
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
    limits, grid = probe.limits, GRID if bench.machine.is_gpu else DRY_GRID
    wanted = [*points(limits, grid), *lane_points(limits, grid)]
    wanted = [point for point in wanted if point.partition in probe.partitions]
    found: Measured = measure_points(probe, list(dict.fromkeys(wanted)), budget_s, min_rounds=2)
    samples = list(found.samples)
    shapes = [(rows, requests) for rows, requests in grid.segments if limits.fits(rows, requests)]
    samples += measure_segments(probe, shapes, 2, limits.max_context)
    most = min(limits.max_rows, limits.max_num_requests * (1 + limits.max_draft_len))
    samples += measure_exits(probe, [n for n in grid.exit_rows if n <= most], 2)
    interference = []
    pairs = [
        (
            Point("draft_step", "draft", requests, requests, limits.max_context),
            Point("verify", "verify", rows, requests, limits.max_context),
        )
        for requests, rows in grid.together
        if limits.fits(rows, requests)
    ]
    if pairs and "draft" in probe.partitions:
        interference.append(measure_interference(probe, pairs, 10 if bench.machine.is_gpu else 2))
    device = str(bench.found_before("environment", "device") or bench.machine.device)
    what = f"{pair.form} of {bench.options.checkpoint_dir.name}, seed {bench.options.seed}"
    engine = hashlib.sha256(what.encode()).hexdigest()
    fingerprint = Fingerprint(device, "cuda" if bench.machine.is_gpu else "dry run", bench.machine.num_sms, engine)
    return CostTable.fit(samples, fingerprint, held_out=found.held_out, interference=interference)


def points(limits: Limits, grid: Grid) -> Iterator[Point]:
    """Target passes by rows with the fewest and the most requests; draft steps; catch-up rows."""
    context = limits.max_context
    for num_rows in grid.rows:
        fitting = [r for r in grid.requests if limits.fits(num_rows, r)]
        for num_requests in dict.fromkeys(fitting[:1] + fitting[-1:]):
            yield Point("verify", ALL, num_rows, num_requests, context)
    for num_requests in grid.requests:
        if num_requests <= limits.max_num_requests:
            yield Point("draft_step", ALL, num_requests, num_requests, context)
            yield Point("verify", ALL, num_requests, num_requests, max(1, context // 4))
    for num_rows in grid.catch_up_rows:
        if num_rows // 2 <= limits.max_num_requests and num_rows <= limits.max_rows:
            yield Point("draft_rows", ALL, num_rows, num_rows // 2, context)
    for num_rows, num_requests in grid.held_out:
        if limits.fits(num_rows, num_requests):
            yield Point("verify", ALL, num_rows, num_requests, context * 3 // 4, held_out=True)


def lane_points(limits: Limits, grid: Grid) -> Iterator[Point]:
    """The two sides of an overlapped step, each alone on its share."""
    context = limits.max_context
    for num_rows in grid.lane_rows:
        fitting = [r for r in grid.requests if limits.fits(num_rows, r)]
        for num_requests in fitting[-1:]:
            yield Point("verify", "verify", num_rows, num_requests, context)
    for num_requests in grid.requests[::2]:
        if num_requests <= limits.max_num_requests:
            yield Point("draft_step", "draft", num_requests, num_requests, context)
