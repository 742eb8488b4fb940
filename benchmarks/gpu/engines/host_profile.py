"""Section "host_profile": time of the executor's thread in a step, by function."""

from __future__ import annotations

import cProfile
import pstats
import re
import statistics
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.jobs import WORDS, measured_load, warm_up_load
from benchmarks.gpu.engines.step_times import StepTimes
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import Pair, open_pair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.policies.drive import drive
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.profiling.prompts import PromptSet

LOAD, DRY_LOAD = 64, 2
SPELLINGS = ("off", "fixed:4")
MAX_FUNCTIONS = 30
ROOT = Path(__file__).parents[3]

Function = tuple[str, int, str]  # as in pstats: file, line, name


def run(bench: Bench) -> None:
    dry, form = bench.is_dry, bench.options.forms[0]
    load = DRY_LOAD if dry else LOAD
    limits = PairLimits(load, prompt_len(bench) + max_tokens(bench) + 16, 64 if dry else 2048)
    prompts = bench_prompts(bench)
    with open_pair(bench, form, limits) as pair:
        for spelling in SPELLINGS:
            bench.record.attempt(
                spelling,
                lambda spelling=spelling: _profile(bench, pair, prompts, load, spelling),  # type: ignore[misc]
            )


def _profile(bench: Bench, pair: Pair, prompts: PromptSet, load: int, spelling: str) -> None:
    limits, times, profile = pair.limits, StepTimes(), cProfile.Profile()
    with pair.executor(make_policy(spelling, limits.max_draft_len, None, limits.max_batch_size)) as executor:
        executor.watch(times)
        drive(executor, warm_up_load(bench, prompts, load))
        work = measured_load(bench, prompts, load, 0)
        times.start()
        drive(executor, work)
        plain_ms = statistics.fmean(step.ms for step in times.steps)
        times.start()
        profile.enable()
        drive(executor, work)
        profile.disable()
        num_steps, profiled_ms = len(times.steps), statistics.fmean(step.ms for step in times.steps)
    bench.record.table(
        f"{pair.name}, {spelling}: the executor's thread, {load} requests",
        ("function", "calls a step", "us a step", "with what it calls"),
        function_rows(profile, num_steps),
        f"By time of its own, with the profiler, which makes a step {profiled_ms:.2f} ms long in the mean, without it "
        f"{plain_ms:.2f} ms; what waits for the device is in it. {WORDS}",
    )
    bench.record.value(f"step ms {spelling}", {"plain": plain_ms, "profiled": profiled_ms})


def function_rows(profile: cProfile.Profile, num_steps: int) -> list[tuple[str, str, str, str]]:
    """Return (function, calls, own us, cumulative us) per step, the longest first."""
    stats: dict[Function, tuple[int, int, float, float, object]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ordered = sorted(stats.items(), key=lambda item: -item[1][2])[:MAX_FUNCTIONS]
    return [
        (
            name_of(function),
            f"{calls / num_steps:.1f}",
            f"{1e6 * own / num_steps:.0f}",
            f"{1e6 * whole / num_steps:.0f}",
        )
        for function, (_, calls, own, whole, _) in ordered
    ]


def name_of(function: Function) -> str:
    """Return a function's name without the machine's folders."""
    file, line, name = function
    if line == 0:
        return re.sub(r" at 0x\w+", "", name)  # a built-in
    path = Path(file)
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    if "site-packages" in path.parts:
        path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    elif path.is_absolute():
        path = Path(path.name)
    return f"{path}:{line} {name}"
