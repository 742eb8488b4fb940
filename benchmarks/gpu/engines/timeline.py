"""Section "timeline": parts of a step's time, for steps that only decode and steps with prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.costs import table_of
from benchmarks.gpu.engines.jobs import WORDS, measured_load, warm_up_load
from benchmarks.gpu.engines.step_times import StepTime, StepTimes
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import Pair, open_pair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.policies.drive import drive
from benchmarks.policies.options import OFF, POLICIES
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.profiling.prompts import PromptSet

LOADS, DRY_LOADS = (64, 16, 4, 256), (2,)
LONGER = 2  # factor of outputs over other sections', so that some steps of a full batch only decode
FULL = 0.9  # share of the streams that decode
MIN_LEFT_S = 15.0
SPELLINGS = {OFF: OFF, "fixed:2": "fixed:2", "fixed:4": "fixed:4", "price": POLICIES["price"]}
HEADER = (
    *("requests", "policy", "steps", "n", "share of time", "rows", "prompt rows"),
    *("schedule ms", "draft ms", "verify ms", "both ms", "update ms", "step ms, mean", "tokens/s"),
)

Row = tuple[object, ...]


def run(bench: Bench) -> None:
    dry, form = bench.is_dry, bench.options.forms[0]
    loads = DRY_LOADS if dry else LOADS
    longest = LONGER * max_tokens(bench)
    limits = PairLimits(max(loads), prompt_len(bench) + longest + 16, 64 if dry else 2048)
    prompts = bench_prompts(bench)
    rows: list[Row] = []
    with open_pair(bench, form, limits) as pair:
        table = table_of(bench, pair, prompt_len(bench) + longest // 2)
        for load in loads:
            for name in SPELLINGS:
                if not dry and bench.left_s < MIN_LEFT_S:
                    bench.record.note(f"{load} requests, {name}: the time was over")
                    continue
                found = bench.record.attempt(
                    f"{load} {name}",
                    lambda load=load, name=name: _measure(bench, pair, prompts, table, load, name),  # type: ignore[misc]
                )
                rows += found or []
                bench.record.table(
                    f"{form}: steps",
                    HEADER,
                    rows,
                    "Medians over the steps but for the mean. decode only: no row of a prompt, and at least "
                    f"{100 * FULL:g}% of the streams decode; with prompts: rows of prompts, those that end in the step "
                    f"included. Prompts of {prompt_len(bench)} tokens, outputs of up to {longest}. {WORDS}",
                )


def _measure(bench: Bench, pair: Pair, prompts: PromptSet, table: CostTable, load: int, name: str) -> list[Row]:
    limits, times = pair.limits, StepTimes()
    policy = make_policy(SPELLINGS[name], limits.max_draft_len, table, limits.max_batch_size)
    with pair.executor(policy) as executor:
        executor.watch(times)
        drive(executor, warm_up_load(bench, prompts, load))
        times.start()
        result = drive(executor, measured_load(bench, prompts, load, 0, LONGER * max_tokens(bench)))
    whole_ms = sum(step.ms for step in times.steps)
    rows: list[Row] = [
        (load, name, kind, *step_cells(steps, whole_ms)) for kind, steps in by_kind(times.steps, load).items() if steps
    ]
    rows.append((load, name, "whole run", len(times.steps), *[None] * 9, f"{result.tokens_per_s:.0f}"))
    return rows


def by_kind(steps: Sequence[StepTime], load: int) -> dict[str, list[StepTime]]:
    found: dict[str, list[StepTime]] = {"decode only": [], "with prompts": [], "fewer requests": []}
    for step in steps:
        if step.num_context_rows:
            found["with prompts"].append(step)
        else:
            found["decode only" if step.num_requests >= FULL * load else "fewer requests"].append(step)
    return found


def step_cells(steps: Sequence[StepTime], whole_ms: float) -> list[str]:
    """Return the columns of HEADER from "n" on."""

    def median(field: str, digits: int = 2) -> str:
        return f"{statistics.median(getattr(step, field) for step in steps):.{digits}f}"

    ms = sum(step.ms for step in steps)
    counts = (median(name, 0) for name in ("num_rows", "num_context_rows"))
    parts = (median(f"{name}_ms") for name in ("schedule", "draft", "verify", "both", "update"))
    rate = 1e3 * sum(step.num_tokens for step in steps) / ms
    return [str(len(steps)), f"{100 * ms / whole_ms:.0f}%", *counts, *parts, f"{ms / len(steps):.2f}", f"{rate:.0f}"]
