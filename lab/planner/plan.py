"""A plan: simulations of every system under every load, with the real scheduler and policies on modeled costs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import InvalidArgumentError
from lab.clock import ManualClock
from lab.costmodel.accuracy import MIXTURE_SPEED_UP, OVERLAP, SPEED_UP, error_by_kind
from lab.costmodel.experts import expert_times
from lab.costmodel.gpu import Gpu
from lab.costmodel.measured import NAMES, MeasuredGpu
from lab.costmodel.pair import Pair
from lab.costmodel.table import modeled_table
from lab.planner.load.run import LoadReport, Objectives, run_arrivals, run_closed_loop
from lab.planner.load.service import ServiceOptions, open_service
from lab.planner.memory import MemoryPlan, plan_memory
from lab.planner.options import MAX_OUTPUT, MAX_PROMPT, Load, PlanOptions, draw_lengths
from lab.planner.systems import DRAFT_MODEL, OFF, PREFERENCE, SYSTEMS, System
from lab.simulation.synthetic_profile import synthetic_profile

MAX_DRAFT_LEN = 8
MAX_BATCH_SIZE = 512  # of an open loop
REQUESTS_PER_STREAM, MIN_REQUESTS = 4, 64  # of a closed loop
AS_GOOD = 0.02  # systems whose scores differ by less count as equal
HOST_REQUESTS = 16  # for the host's time of a step, which hardly depends on them
QUANTILES = (0.5, 0.9, 0.99)

Progress = Callable[[str, int, int], None]
"""A callback that gets the name of the run, and how many requests have ended of how many."""


@dataclass(frozen=True)
class Band:
    """A figure with its error band."""

    low: float
    value: float
    high: float

    @staticmethod
    def of(value: float, error: float) -> Band:
        return Band(value / (1.0 + error), value, value * (1.0 + error))


@dataclass(frozen=True)
class Run:
    """One system under one load. Times are ms by quantile. speed_up: tokens per second over those of `off`.

    goodput: share of requests that meet the objectives. is_memory_bound: not all requests of the load fit at a time.
    """

    load: str
    concurrency: int | None
    system: str
    tokens_per_s: Band
    speed_up: Band
    ttft_ms: dict[str, Band]
    tpot_ms: dict[str, Band]
    goodput: Band
    acceptance: float
    num_requests: int
    overlapped_share: float
    is_memory_bound: bool
    tokens_by_minute: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A plan. memory: by System.drafter. recommended: a system's label. distinct_experts: per layer of a mixture, by
    number of running requests, in passes with 1 and with 1 + MAX_DRAFT_LEN rows of each request."""

    question: dict[str, Any]
    source: str
    anchors: str
    error: dict[str, float]
    memory: dict[str, MemoryPlan]
    distinct_experts: dict[int, tuple[float, float]]
    runs: tuple[Run, ...]
    recommended: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def make_plan(options: PlanOptions, progress: Progress = lambda what, done, total: None) -> Plan:
    """Simulate all runs; InvalidArgumentError if the models do not fit."""
    mean_len = math.ceil(options.requests.prompt_mean + options.requests.output_mean)
    target = options.target
    drafts = {DRAFT_MODEL: options.draft, "eagle3": target.eagle3(), "block": target.block_drafter()}
    asked = dict.fromkeys([DRAFT_MODEL, *(SYSTEMS[label].drafter for label in options.systems)])
    drafts = {name: drafts[name] for name in asked if name != OFF}
    memory = {OFF: plan_memory(options.gpu, target, None, mean_len)}
    memory |= {name: plan_memory(options.gpu, target, draft, mean_len) for name, draft in drafts.items()}
    largest = max(load.concurrency or MAX_BATCH_SIZE for load in options.loads)
    tables = {}
    for name, draft in drafts.items():
        given = _read_table(options) if name == DRAFT_MODEL else None
        signal = options.exit_signal if name == DRAFT_MODEL else None
        pair = Pair(options.gpu, target, draft)
        tables[name] = given or modeled_table(pair, max_batch_size=largest, exit_signal=signal)
    table = tables[DRAFT_MODEL]
    runs: list[Run] = []
    for load in options.loads:
        off: LoadReport | None = None
        for label in options.systems:
            system = SYSTEMS[label]
            costs = table if system.drafter == OFF else tables[system.drafter]
            what = f"{load.name}, {label}"
            room = memory[system.drafter]
            report, stats = _simulate(options, load, system, costs, room, lambda *a, w=what: progress(w, *a))
            off = off or report
            runs.append(_run(options, load, label, report, stats, room, off, table))
    return Plan(
        _question(options),
        table.source,
        table.anchors or "measured on the machine that the table names",
        dict(table.held_out_errors),
        memory,
        _distinct_experts(options, table),
        tuple(runs),
        _recommended(options, runs),
    )


def _read_table(options: PlanOptions) -> CostTable | None:
    if options.table is None:
        return None
    name = str(options.table)
    if name in NAMES:
        return _measured_table(name, options.gpu)
    if not options.table.is_file():
        raise InvalidArgumentError(f"table is {name!r}, which is no file and none of {', '.join(NAMES)}")
    return CostTable.read(options.table)


def _measured_table(name: str, gpu: Gpu) -> CostTable:
    """Return the table of a full profile, with the host's time of a step of HOST_REQUESTS requests."""
    measured = MeasuredGpu(name)
    if measured.gpu != gpu.name:
        raise InvalidArgumentError(f"table is {name}, which needs gpu {measured.gpu}; it is {gpu.name}")
    host_ms = measured.host_ms(HOST_REQUESTS, 0, is_drafting=True) - float(measured.data["probe_ms"]["ms"])
    return replace(synthetic_profile(measured, quick=False), overhead_ms=host_ms, anchors=measured.source)


def _simulate(
    options: PlanOptions,
    load: Load,
    system: System,
    table: CostTable,
    room: MemoryPlan,
    progress: Callable[[int, int], None],
) -> tuple[LoadReport, dict[str, float]]:
    batch = load.concurrency or MAX_BATCH_SIZE
    total = options.max_requests
    if load.concurrency is not None:
        total = min(total, max(MIN_REQUESTS, REQUESTS_PER_STREAM * load.concurrency))
        total = max(total, load.concurrency + 1)
    service = ServiceOptions(
        speculation=system.speculation,
        costs=table,
        acceptance=options.head_acceptance.get(system.drafter, options.acceptance),
        max_batch_size=batch,
        max_num_tokens=options.max_num_tokens,
        max_prompt_len=MAX_PROMPT,
        max_output_len=MAX_OUTPUT,
        max_draft_len=MAX_DRAFT_LEN,
        kv_tokens=min(room.kv_tokens, batch * (MAX_PROMPT + MAX_OUTPUT)),
        seed=options.seed,
    )
    objectives = Objectives(options.ttft_ms, options.tpot_ms, _error(options, table, 0.0))
    clock = ManualClock()
    with open_service(service, clock) as executor:
        if load.concurrency is not None:
            report = run_closed_loop(
                executor,
                clock,
                draw_lengths(options),
                load.concurrency,
                total,
                objectives,
                lambda done: progress(done, total),
            )
        else:
            arrivals = itertools.islice(load.arrivals(), total)
            report = run_arrivals(executor, clock, arrivals, objectives, lambda done: progress(done, total))
            if not report.num_requests:
                raise InvalidArgumentError(
                    f"load is {load.name}, which has no requests with output tokens; use a trace that has some or a "
                    "higher rate"
                )
            progress(report.num_requests, report.num_requests)  # a trace may end before max_requests
        return report, executor.stats()


def _error(options: PlanOptions, table: CostTable, overlapped_share: float) -> float:
    """Return the error of times: the table's own, and more if drafting and verification overlap."""
    by_kind = table.held_out_errors or error_by_kind(options.gpu.name, is_mixture=options.target.experts is not None)
    return max(by_kind.get("decode", 0.0), by_kind.get("verify", 0.0)) + overlapped_share * OVERLAP


def _run(
    options: PlanOptions,
    load: Load,
    label: str,
    report: LoadReport,
    stats: dict[str, float],
    room: MemoryPlan,
    off: LoadReport,
    table: CostTable,
) -> Run:
    overlapped = stats.get("num_steps_ping_pong", 0.0) + stats.get("num_steps_draft_ahead", 0.0)
    share = overlapped / max(1.0, stats["num_steps"])
    error = _error(options, table, share)
    ratio = report.tokens_per_s / off.tokens_per_s
    low, high = report.goodput_band
    speed_up_error = MIXTURE_SPEED_UP if options.target.experts is not None else SPEED_UP
    return Run(
        load.name,
        load.concurrency,
        label,
        Band.of(report.tokens_per_s, error),
        Band.of(ratio, 0.0 if label == OFF else min(speed_up_error, error) + share * OVERLAP),
        {f"p{100 * q:g}": Band.of(report.ttft_ms.percentile(q), error) for q in QUANTILES},
        {f"p{100 * q:g}": Band.of(report.tpot_ms.percentile(q), error) for q in QUANTILES},
        Band(low, report.goodput, high),
        stats["num_accepted_tokens"] / max(1.0, stats["num_draft_tokens"]),
        report.num_requests,
        share,
        (load.concurrency or 0) > room.max_batch_size,
        tuple(report.tokens_by_minute),
    )


def _question(options: PlanOptions) -> dict[str, Any]:
    gpu, requests = options.gpu, options.requests
    routing = None if options.target.experts is None else options.target.experts.routing
    return {
        "gpu": gpu.name,
        "num_gpus": options.target.num_gpus,
        "target": options.target.name,
        "draft": options.draft.name,
        "quantization": "fp8" if options.target.weight_bytes == 1 else "none",
        "is_expert_time_assumed": routing is not None and expert_times(gpu, options.target).is_assumed,
        "num_experts": 0 if routing is None else routing.num_experts,
        "expert_overlap": None if routing is None else routing.overlap,
        "acceptance_by_place": [round(rate, 3) for rate in options.acceptance.by_place],
        "acceptance_curves": [curve for curve in _curves(options) if curve is not None],
        "loads": [load.name for load in options.loads],
        "prompt_len_mean": round(requests.prompt_mean),
        "output_len_mean": round(requests.output_mean),
        "ttft_ms": options.ttft_ms,
        "tpot_ms": options.tpot_ms,
        "max_num_tokens": options.max_num_tokens,
        "table": None if options.table is None else options.table.name,
        "seed": options.seed,
    }


def _curves(options: PlanOptions) -> tuple[str | None, ...]:
    return options.acceptance.curve, *(acceptance.curve for acceptance in options.head_acceptance.values())


def _distinct_experts(options: PlanOptions, table: CostTable) -> dict[int, tuple[float, float]]:
    routing = table.routing
    loads = sorted({load.concurrency for load in options.loads if load.concurrency is not None})
    if routing is None:
        return {}
    return {n: (routing.distinct([1] * n), routing.distinct([1 + MAX_DRAFT_LEN] * n)) for n in loads}


def _recommended(options: PlanOptions, runs: list[Run]) -> str:
    """Return the best system by the geometric mean over loads of tokens per second (within the objectives, if any).

    Among equals it is the first one in PREFERENCE.
    """
    has_objectives = options.ttft_ms is not None or options.tpot_ms is not None

    def score(label: str) -> float:
        found = [run for run in runs if run.system == label]
        rates = [run.tokens_per_s.value * (run.goodput.value if has_objectives else 1.0) for run in found]
        return math.exp(sum(math.log(max(rate, 1e-9)) for rate in rates) / len(rates))

    scores = {label: score(label) for label in PREFERENCE if label in options.systems}
    best = max(scores.values())
    return next(label for label in scores if scores[label] * (1.0 + AS_GOOD) >= best)
