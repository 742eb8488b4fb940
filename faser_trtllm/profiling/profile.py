"""`faser profile`: measure an engine directory on this machine and write the cost table next to the engines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from faser_trtllm.backends import find_backend
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_table import ALL, CostSample, CostTable, Fingerprint, Interference
from faser_trtllm.errors import ConfigError
from faser_trtllm.fingerprint import PROFILE, fingerprint_of
from faser_trtllm.json_text import write_json
from faser_trtllm.profiling.calibrate import Calibration, calibrate, read_prompts
from faser_trtllm.profiling.grid import (
    Limits,
    Point,
    decode_points,
    draft_points,
    expert_points,
    held_out_points,
    verify_points,
)
from faser_trtllm.profiling.measure import (
    Measured,
    measure_again,
    measure_exits,
    measure_interference,
    measure_points,
    measure_quickly,
    measure_segments,
)
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.probe import Probe
from faser_trtllm.profiling.report import ProfileReport

log = logging.getLogger(__name__)

QUICK_BUDGET_S = 2.0  # time for passes, if one round takes less
QUICK_ROUND_S = 4.0  # after this a quick profile skips points that curves can extrapolate to
QUICK_FILL_S = 0.5
QUICK_SEGMENT_ROWS = ((1, 1), (8, 2), (32, 8), (64, 16))
SEGMENT_ROWS = ((1, 1), (4, 1), (8, 2), (16, 4), (17, 4), (32, 8), (33, 8), (48, 8), (64, 16), (96, 16), (128, 32))
EXIT_ROWS = (1, 8, 32, 128)
TARGET_KINDS = ("verify", "decode")
LANE_SHAPES = ((1, 4), (4, 16), (8, 32))  # (requests drafted, rows verified) concurrently

Progress = Callable[[str, int, int], None]  # (what is measured, units done, total units)


def profile_engine_dir(options: ProfileOptions, progress: Progress | None = None) -> ProfileReport:
    """Call measure_engine_dir and write profile.json into the engine directory.

    Raises its errors, and OSError if the directory cannot be written.
    """
    report = measure_engine_dir(options, progress)
    write_json(report.to_json(), options.engine_dir / PROFILE)
    return report


def measure_engine_dir(options: ProfileOptions, progress: Progress | None = None) -> ProfileReport:
    """Measure without writing anything; log a warning if other work disturbed it, or if curves do not fit.

    Raises InvalidArgumentError, EngineFileError, and ConfigError if max_draft_len is 0 or a GPU is missing.
    """
    options.validate()
    say = progress or (lambda what, done, total: None)
    start = time.perf_counter()
    engines = EngineDir.load(options.engine_dir)
    if not engines.build_config.max_draft_len:
        raise ConfigError(
            f"{options.engine_dir.name} has max_draft_len 0, so there is no speculation to profile; "
            "build it with --draft_checkpoint_dir, or a larger --max_draft_len"
        )
    # Prompts first: what is wrong with them is told before minutes of measuring.
    prompts = read_prompts(engines, options) if not options.quick and engines.has_draft else []
    with _open_probe(engines, options) as probe:
        passes = measure_passes(probe, options, say)
        fingerprint = fingerprint_of(options.engine_dir, probe.num_units)
    table = passes.table(fingerprint)
    for warning in table.warnings:
        log.warning("%s", warning)
    found = Calibration()
    if prompts:
        found = calibrate(engines, prompts, table, options, say)
    return ProfileReport(
        table=replace(table, exits=found.exits, overhead_ms=found.overhead_ms),
        samples=passes.samples,
        held_out=passes.held_out,
        exit_quality=found.quality,
        num_exit_observations=found.num_observations,
        num_rounds=passes.num_rounds,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class Passes:
    """A probe's measurements of target and draft. Curves are fitted to samples, not to held_out."""

    samples: tuple[CostSample, ...]
    held_out: tuple[CostSample, ...]
    interference: tuple[Interference, ...]
    num_rounds: int
    warning: str = ""
    quick: bool = False
    sizes: tuple[int, ...] = ()  # passes are padded to these
    routing: Routing | None = None  # of a mixture of experts that reads random tokens

    def table(self, fingerprint: Fingerprint) -> CostTable:
        return CostTable.fit(
            self.samples,
            fingerprint,
            held_out=self.held_out,
            interference=self.interference,
            warning=self.warning,
            quick=self.quick,
            sizes=self.sizes,
            routing=self.routing,
        )


def measure_passes(probe: Probe, options: ProfileOptions, say: Progress = lambda what, done, total: None) -> Passes:
    """Fill the caches of open engines and time their passes, segments and overlap."""
    probe.fill(lambda done, total: say("filling caches", done, total), QUICK_FILL_S if options.quick else math.inf)
    points = grid(probe.limits, probe.partitions, options, probe.draft is not None, bool(probe.target.spec.num_experts))
    if probe.draft is not None and probe.draft.spec.block_size:
        points = [replace(p, kind="draft_block") if p.kind == "draft_rows" else p for p in points]

    def tick(done: int, total: int) -> None:
        say("passes", done, total)

    def measure(points: Sequence[Point]) -> Measured:
        if options.quick:
            return measure_quickly(probe, points, QUICK_BUDGET_S, math.inf if options.overlap else QUICK_ROUND_S, tick)
        return measure_points(probe, points, options.time_budget_s, tick)

    measured = measure_again(measure(points), points, measure, probe.row_sizes)
    samples = (*measured.samples, *_segments(probe, options, say))
    interference = tuple(_interference(probe, options, say))
    return Passes(
        samples,
        measured.held_out,
        interference,
        measured.num_rounds,
        measured.warning,
        options.quick,
        probe.row_sizes,
        measured_routing(probe),
    )


def measured_routing(probe: Probe) -> Routing | None:
    """Return how the tokens of timed passes chose experts; None without experts."""
    spec = probe.target.spec
    seen = {point: count for point, count in probe.num_experts.items() if count and not point.same_tokens}
    if not spec.num_experts or not seen:
        return None
    counts = [(point.num_rows, point.num_requests, count) for point, count in seen.items()]
    return Routing(spec.num_experts, spec.top_k).fitted(counts)


def _open_probe(engines: EngineDir, options: ProfileOptions) -> Probe:
    if find_backend(engines.backend).on_cpu:
        from faser_trtllm.profiling.cpu_probe import CpuProbe

        return CpuProbe(engines, options.cores, options.num_threads, options.quick)
    from faser_trtllm.profiling.gpu_probe import open_gpu_probe

    return open_gpu_probe(engines, options.quick, options.overlap)


def grid(
    limits: Limits,
    partitions: tuple[str, ...],
    options: ProfileOptions,
    has_draft: bool = True,
    has_experts: bool = False,
) -> list[Point]:
    """Return the points to measure. The partitions "verify" and "draft" get the quick grid, or none without a draft."""
    points = [*verify_points(limits, ALL, options.quick), *draft_points(limits, ALL, options.quick)]
    points += expert_points(limits, ALL) if has_experts else []
    points += decode_points(limits, options.quick)
    if "verify" in partitions and (options.overlap or not options.quick):
        points += verify_points(limits, "verify", quick=True)
        points += draft_points(limits, "draft", quick=True)
    seen = {(p.kind, p.num_rows, p.num_requests, p.context_len) for p in points}
    points += [
        p
        for p in held_out_points(limits, options.seed, options.quick)
        if (p.kind, p.num_rows, p.num_requests, p.context_len) not in seen
    ]
    return [p for p in dict.fromkeys(points) if has_draft or (p.kind in TARGET_KINDS and p.partition == ALL)]


def _segments(probe: Probe, options: ProfileOptions, say: Progress) -> list[CostSample]:
    if len(probe.target.spec.segments) <= 2:
        return []
    say("segments", 0, 1)
    limits = probe.limits
    shapes = [pair for pair in (QUICK_SEGMENT_ROWS if options.quick else SEGMENT_ROWS) if limits.fits(*pair)]
    num_rounds = 1 if options.quick else 6
    samples = measure_segments(probe, shapes, num_rounds, limits.main_context())
    samples += measure_exits(probe, [n for n in EXIT_ROWS if n <= limits.max_rows], num_rounds)
    say("segments", 1, 1)
    return samples


def _interference(probe: Probe, options: ProfileOptions, say: Progress) -> list[Interference]:
    """Measure the draft on its partition next to a target on "verify", and next to a target on "all"."""
    if "draft" not in probe.partitions or (options.quick and not options.overlap) or probe.draft is None:
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
        say("both streams", number + 1, 2)
    return found
