"""`faser profile`: measures an engine directory on this machine and writes the cost table beside the engines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost_table import ALL, CostSample, CostTable, Interference
from faser_trtllm.engine.fingerprint import PROFILE, fingerprint_of
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.calibrate import Calibration, calibrate
from faser_trtllm.profiling.grid import Limits, Point, decode_points, draft_points, held_out_points, verify_points
from faser_trtllm.profiling.measure import measure_exits, measure_interference, measure_points, measure_segments
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.plot import write_plot
from faser_trtllm.profiling.probe import Probe
from faser_trtllm.profiling.report import ProfileReport

PLOT_FILE = "profile.png"
QUICK_BUDGET_S = 2.0
SEGMENT_ROWS = ((1, 1), (4, 1), (8, 2), (16, 4), (17, 4), (32, 8), (33, 8), (48, 8), (64, 16), (96, 16), (128, 32))
EXIT_ROWS = (1, 8, 32, 128)
LANE_SHAPES = ((1, 4), (4, 16), (8, 32))  # requests drafted, rows verified at the same time

Progress = Callable[[str, int, int], None]  # what is measured, how much of it is done, how much there is


def profile_engine_dir(options: ProfileOptions, progress: Progress | None = None) -> ProfileReport:
    """Measure, then write profile.json and (with matplotlib, unless quick) profile.png into the engine directory.

    Raises ConfigError if the directory has no draft engine or is not the CPU's, EngineFileError if it is not usable.
    """
    options.validate()
    say = progress or (lambda what, done, total: None)
    start = time.perf_counter()
    engines = EngineDir.load(options.engine_dir)
    if engines.backend != "cpu":
        raise ConfigError(
            f"{options.engine_dir.name} holds {engines.backend} engines, and faser profile measures cpu engines only; "
            "speculate with fixed:K or gp_lcb, which need no cost table"
        )
    if not engines.has_draft:
        raise ConfigError(
            f"{options.engine_dir.name} has no draft engine, so there is no speculation to profile; "
            "build it with --draft_checkpoint_dir"
        )
    with Probe(engines, options.cores, options.num_threads) as probe:
        probe.fill(lambda done, total: say("filling caches", done, total))
        measured = measure_points(
            probe,
            list(grid(probe.limits, probe.partitions, options)),
            QUICK_BUDGET_S if options.quick else options.time_budget_s,
            lambda done, total: say("passes", done, total),
            min_rounds=2 if options.quick else 3,
        )
        samples = [*measured.samples, *_segments(probe, options, say)]
        interference = _interference(probe, options, say)
        fingerprint = fingerprint_of(options.engine_dir, probe.core_sets[ALL].num_threads)
    table = CostTable.fit(samples, fingerprint, held_out=measured.held_out, interference=interference)
    found = Calibration()
    if not options.quick:
        found = calibrate(engines, table, options, say)
    report = ProfileReport(
        table=CostTable.fit(
            samples,
            fingerprint,
            held_out=measured.held_out,
            interference=interference,
            exits=found.exits,
            overhead_ms=found.overhead_ms,
        ),
        samples=tuple(samples),
        held_out=measured.held_out,
        exit_quality=found.quality,
        num_exit_observations=found.num_observations,
        num_rounds=measured.num_rounds,
        seconds=time.perf_counter() - start,
    )
    write_report(report, options)
    return report


def load_or_measure(
    engine_dir: Path,
    cores: tuple[int, ...] | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> CostTable:
    """The engine directory's cost table; a quick measurement if it has none that fits this machine.

    The quick table is written into the directory where that is possible, but never over a table of another machine.
    """
    path = engine_dir / PROFILE
    options = ProfileOptions(engine_dir, quick=True, cores=cores, num_threads=num_threads)
    if path.exists():
        with CoreSet(cores, num_threads) as everything:
            fingerprint = fingerprint_of(options.engine_dir, everything.num_threads)
        return CostTable.load(path, fingerprint)
    return profile_engine_dir(options, progress).table


def write_report(report: ProfileReport, options: ProfileOptions) -> None:
    """profile.json appears whole or not at all."""
    path = options.engine_dir / PROFILE
    staged = path.with_name(path.name + ".tmp")
    staged.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    staged.replace(path)
    if options.plot and not options.quick:
        write_plot(report, options.engine_dir / PLOT_FILE)


def grid(limits: Limits, partitions: tuple[str, ...], options: ProfileOptions) -> list[Point]:
    """Every point to measure; the lanes' partitions get the quick grid, since two cores leave little to choose."""
    points = [*verify_points(limits, ALL, options.quick), *draft_points(limits, ALL, options.quick)]
    points += decode_points(limits, options.quick)
    if "verify" in partitions and not options.quick:
        points += verify_points(limits, "verify", quick=True)
        points += draft_points(limits, "draft", quick=True)
    if not options.quick:
        seen = {(p.kind, p.num_rows, p.num_requests, p.context_len) for p in points}
        points += [
            p
            for p in held_out_points(limits, options.seed)
            if (p.kind, p.num_rows, p.num_requests, p.context_len) not in seen
        ]
    return list(dict.fromkeys(points))


def _segments(probe: Probe, options: ProfileOptions, say: Progress) -> list[CostSample]:
    if len(probe.target.spec.segments) <= 2:
        return []
    say("segments", 0, 1)
    limits = probe.limits
    shapes = [(rows, requests) for rows, requests in SEGMENT_ROWS if limits.fits(rows, requests)]
    num_rounds = 2 if options.quick else 6
    samples = measure_segments(probe, shapes, num_rounds, limits.main_context())
    samples += measure_exits(probe, [n for n in EXIT_ROWS if n <= limits.max_rows], num_rounds)
    say("segments", 1, 1)
    return samples


def _interference(probe: Probe, options: ProfileOptions, say: Progress) -> list[Interference]:
    """The draft on its core beside a target on the others, and beside a target on every core."""
    if "draft" not in probe.partitions or options.quick:
        return []
    limits, found = probe.limits, []
    for number, partition in enumerate(("verify", ALL)):
        pairs = [
            (
                Point("draft_step", "draft", requests, requests, limits.main_context()),
                Point("verify", partition, rows, max(requests, 1), limits.main_context()),
            )
            for requests, rows in LANE_SHAPES
            if limits.fits(rows, requests)
        ]
        if pairs:
            found.append(measure_interference(probe, pairs, 15))
        say("both lanes", number + 1, 2)
    return found
