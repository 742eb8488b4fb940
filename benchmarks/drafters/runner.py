"""Run the workloads with every set of drafters, interleaved, and report the results of each source."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.environment import describe_environment
from benchmarks.common.markdown import table
from benchmarks.drafters.plot import write_plot
from benchmarks.drafters.replay import ReplayEngine
from benchmarks.drafters.workload import Job, completions, edits
from benchmarks.policies.simulation import open_simulation
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import DrafterName, ExecutorConfig, parse
from faser_trtllm.core.plan import RequestOutput, StepRecord
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import Engine
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.fingerprint import load_costs
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.ensure import ensure_profile
from lab.clock import ManualClock

OFF = "off"
TEMPERATURE = 0.8
SYSTEMS = (
    OFF,
    "fixed:8/suffix",
    "fixed:4/model",
    "fixed:8/suffix+model",
    "price/suffix",
    "price/model",
    "price/suffix+model",
)


@dataclass(frozen=True)
class DrafterBenchOptions:
    """Options of the bench.

    systems: "off", or speculation/drafters such as price/suffix+model, optionally followed by /num_branches.
    simulated: times are those of the engines' cost table, in which drafts from the text cost nothing.
    """

    engine_dir: Path
    output_dir: Path
    systems: tuple[str, ...] = SYSTEMS
    num_jobs: int = 20
    num_tokens: int = 144
    num_rounds: int = 3
    num_threads: int | None = None
    simulated: bool = False
    command_line: tuple[str, ...] = ()


@dataclass
class Counts:
    """Sums over all rounds of a system on a workload. cpu_s: of all threads. draft_steps: of the draft model."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    passes: int = 0
    rows: int = 0
    draft_steps: int = 0
    tested: dict[str, int] | None = None
    passed: dict[str, int] | None = None


def _config_of(name: str, num_threads: int | None) -> ExecutorConfig:
    """Return a system's configuration; ConfigError for an unknown system."""
    speculation, *rest = name.split("/")
    if len(rest) > 2:
        raise ConfigError(f"systems has {name}, allowed is off, or speculation/drafters/num_branches")
    values = {"speculation": speculation, "num_threads": num_threads, "max_batch_size": 1}
    fields = zip(("drafters", "num_branches"), rest, strict=False)
    try:
        return parse(ExecutorConfig, values | {field: value.replace("+", ",") for field, value in fields if value})
    except ConfigError as error:
        raise ConfigError(f"systems has {name}: {error}") from error


class _System(StepWatcher):
    """An executor and the engine that replays its target's texts."""

    def __init__(self, name: str, options: DrafterBenchOptions, stack: ExitStack) -> None:
        self.name = name
        config = _config_of(name, options.num_threads)
        ensure_profile(options.engine_dir, config)
        self._replay: ReplayEngine | None = None
        self._now_s: Callable[[], float] = time.perf_counter
        self._executor: Executor
        if options.simulated:
            clock = ManualClock()
            self._now_s = clock.now_s
            costs = load_costs(options.engine_dir, options.num_threads or len(os.sched_getaffinity(0)))
            if costs is None:
                raise ConfigError(f"{options.engine_dir} has no cost table; run `faser profile` on it")
            opened = open_simulation(options.engine_dir, config, costs, clock, wrap_engine=self._wrap)
        else:
            opened = open_executor(options.engine_dir, config, wrap_engine=self._wrap)
        self._executor = stack.enter_context(opened)
        self._executor.watch(self)
        self._steps = [0, 0, 0]  # passes that commit, their rows, and draft steps

    def _wrap(self, engine: Engine, role: str) -> Engine:
        if role != "target":
            return engine
        self._replay = ReplayEngine(engine)
        return self._replay

    def step(self, record: StepRecord) -> None:
        num_free = record.drafts.num_free
        self._steps[2] += record.num_drafted - (0 if num_free is None else int(num_free.sum()))
        if record.plan.scheduled.num_decoding:
            self._steps[0] += 1
            self._steps[1] += 1 + record.num_verified + record.result.num_branches

    def run(self, jobs: Sequence[Job], counts: Counts) -> list[list[int]]:
        texts = []
        assert self._replay is not None
        before = self._executor.stats()
        self._steps = [0, 0, 0]
        begun, begun_cpu_s = self._now_s(), time.process_time()
        for number, job in enumerate(jobs):
            texts.append(self._run_one(number, job))
        counts.seconds += self._now_s() - begun
        counts.cpu_s += time.process_time() - begun_cpu_s
        after = self._executor.stats()
        counts.tokens += sum(len(text) - 1 for text in texts)  # the first one comes from the prompt's pass
        counts.passes, counts.rows, counts.draft_steps = (
            total + new
            for total, new in zip((counts.passes, counts.rows, counts.draft_steps), self._steps, strict=True)
        )
        for source in DrafterName:
            for mine, key in ((counts.tested, "tested"), (counts.passed, "passed")):
                name = f"num_{key}_drafts_{source.value}"
                if mine is not None and name in after:
                    mine[source.value] = mine.get(source.value, 0) + int(after[name] - before[name])
        return texts

    def _run_one(self, number: int, job: Job) -> list[int]:
        text: list[int] = []

        def sink(output: RequestOutput) -> bool:
            text.extend(output.new_token_ids)
            return False

        assert self._replay is not None
        self._replay.say([*job.prompt, *job.replay] if job.replay else ())
        seed = number if job.temperature else None
        params = SamplingParams(max_tokens=job.num_tokens, temperature=job.temperature, seed=seed)
        self._executor.submit(str(number), job.prompt, params, sink)
        while self._executor.step():
            pass
        return text


def run_drafter_bench(options: DrafterBenchOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and write drafters.json, drafters.md and, with matplotlib, drafters.png.

    AssertionError if a text depends on the drafter.
    """
    for name in options.systems:
        _config_of(name, options.num_threads)  # refuse an unknown one before any work
    tokenizer = Tokenizer.load(EngineDir.load(options.engine_dir).tokenizer_dir)
    workloads = {
        "completion, greedy": completions(tokenizer, options.num_jobs, options.num_tokens, 0.0),
        "completion, 0.8": completions(tokenizer, options.num_jobs, options.num_tokens, TEMPERATURE),
        "edits, replayed": edits(tokenizer, options.num_jobs),
    }
    found: dict[str, dict[str, Counts]] = {name: {} for name in workloads}
    texts: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        systems = [_System(name, options, stack) for name in options.systems]
        for number in range(options.num_rounds):
            for workload, jobs in workloads.items():
                for system in systems:
                    counts = found[workload].setdefault(system.name, Counts(tested={}, passed={}))
                    said = system.run(jobs, counts)
                    assert texts.setdefault(workload, said) == said, f"{system.name} changed the text of {workload}"
            say(f"round {number + 1} of {options.num_rounds}")
    report = {
        "environment": describe_environment(options.command_line),
        "results": {w: {s: asdict(counts) for s, counts in systems.items()} for w, systems in found.items()},
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "drafters.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.output_dir / "drafters.md").write_text(_markdown(report, found, options.simulated))
    write_plot(report, options.output_dir / "drafters.png")
    return report


def _markdown(report: dict[str, Any], found: dict[str, dict[str, Counts]], simulated: bool) -> str:
    lines = ["# faser bench drafters", "", f"`{report['environment']['command_line']}`", ""]
    kind = "One stream; times are simulated from a cost table." if simulated else "One stream."
    lines += [f"{report['environment']['cpu']}, {report['environment']['date']}. {kind}", ""]
    header = (
        "workload",
        "system",
        "tokens/pass",
        "rows/pass",
        "draft steps/token",
        "accepted",
        "tokens/s",
        "to off",
        "CPU, to off",
    )
    rows = []
    for workload, systems in found.items():
        off = systems.get(OFF)
        for name, c in systems.items():
            tested, passed = c.tested or {}, c.passed or {}
            accepted = ", ".join(f"{s} {passed[s]}/{n}" for s, n in tested.items() if n)
            speed = c.tokens / c.seconds
            to_off = f"{speed * off.seconds / off.tokens:.2f}" if off else ""
            cpu = f"{c.tokens / c.cpu_s * off.cpu_s / off.tokens:.2f}" if off else ""
            cells = (f"{c.tokens / c.passes:.2f}", f"{c.rows / c.passes:.2f}", f"{c.draft_steps / c.tokens:.2f}")
            rows.append((workload, name, *cells, accepted, f"{speed:.0f}", to_off, cpu))
    return "\n".join([*lines, table(header, rows), ""])
