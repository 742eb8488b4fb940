"""`faser bench policies`: interleaved rounds of all policies on all workloads, form by form."""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.agreement import first_difference
from benchmarks.common.environment import CpuMeter, describe_environment, portable
from benchmarks.common.profile_lines import profile_lines
from benchmarks.policies.bound import adaptivity_bound
from benchmarks.policies.drive import DriveResult
from benchmarks.policies.markdown import render_markdown
from benchmarks.policies.options import OFF, PolicyBenchOptions
from benchmarks.policies.plot import write_plots
from benchmarks.policies.report import BURSTY, Calibration, Case, PolicyBenchReport, Round, Timeline
from benchmarks.policies.systems import System, open_system
from benchmarks.policies.workload import Job, Workload, bursty, closed_loop, draw_jobs
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import FaserError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import profile_engine_dir
from faser_trtllm.profiling.prompts import PromptSet, draw_prompts

NUM_PROMPTS = 48
JSON_FILE = "policies.json"
Progress = Callable[[str], None]


def run_policy_bench(options: PolicyBenchOptions, progress: Progress | None = None) -> PolicyBenchReport:
    """Measure, and write policies.json, policies.md and (with matplotlib) plots into options.output_dir.

    The files are written after each form, so that an interrupted run leaves what it has.
    """
    options.validate()
    say = progress or (lambda line: None)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    environment, meter = describe_environment(options.command_line), CpuMeter()
    tokenizer = Tokenizer.load(options.checkpoint_dir)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts = draw_prompts(encode, NUM_PROMPTS, options.prompt_len, options.seed)
    start_s, runs = time.monotonic(), []
    with ExitStack() as stack:
        engines_dir = options.engines_dir
        if engines_dir is None:
            engines_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-bench-")))
        for number, expand in enumerate(options.expand):
            run = FormRun(options, expand, engines_dir, prompts, say)
            runs.append(run)
            run.measure(60.0 * options.minutes / len(options.expand))
            report = PolicyBenchReport(
                environment=environment | meter.shares(),
                options=_options_dict(options),
                prompts={"source": prompts.source, "held_out": prompts.held_out},
                cost_error={str(r.expand): dict(r.cost_error) for r in runs},
                cases=tuple(case for r in runs for case in r.cases()),
                calibrations=tuple(c for r in runs for c in r.calibrations),
                timelines=tuple(t for r in runs for t in r.timelines),
                differences=tuple(d for r in runs for d in r.differences),
                absences=tuple(a for r in runs for a in r.absences),
                bounds={str(r.expand): bound for r in runs if (bound := r.bound()) is not None},
                minutes=(time.monotonic() - start_s) / 60.0,
            )
            write_report(report, options.output_dir)
            say(f"form {number + 1} of {len(options.expand)} done, wrote {JSON_FILE} to {options.output_dir}")
    return report


def write_report(report: PolicyBenchReport, output_dir: Path) -> None:
    report.write_json(output_dir / JSON_FILE)
    (output_dir / "policies.md").write_text(render_markdown(report))
    write_plots(report, output_dir)


class FormRun:
    """All rounds of one form of the target. Only measure() writes the fields."""

    def __init__(
        self, options: PolicyBenchOptions, expand: int, engines_dir: Path, prompts: PromptSet, say: Progress
    ) -> None:
        self.expand = expand
        self.cost_error: dict[str, float] = {}
        self.calibrations: list[Calibration] = []
        self.timelines: list[Timeline] = []
        self.differences: list[str] = []
        self.absences: list[str] = []
        self._options = options
        self._engine_dir = engines_dir / f"x{expand}"
        self._prompts = prompts
        self._say = say
        self._warm_up: dict[tuple[str, str], Round] = {}
        self._rounds: dict[tuple[str, str], list[Round]] = {}
        self._reference: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {}

    def measure(self, budget_s: float) -> None:
        table = self._prepare()
        with ExitStack() as stack:
            systems = self._open(table, stack)
            gc.collect()  # as in the server, so that no system is charged for live objects
            gc.freeze()
            stack.callback(gc.unfreeze)
            deadline_s = time.monotonic() + budget_s
            for workload in self._closed_loops(0):
                self._visit(workload, list(systems.values()), 0)
            if self._options.bursty:
                self._visit(self._bursty(0), list(systems.values()), 0)
            self._say(f"x{self.expand}: warm-up done, {deadline_s - time.monotonic():.0f} s left for rounds")
            for number in range(1, self._options.max_rounds + 1):
                workloads = self._closed_loops(number) + ([self._bursty(number)] if self._options.bursty else [])
                # Visits are finished, and the first of each is always made, so that no result is that of a warm-up.
                for workload in workloads if number % 2 == 0 else reversed(workloads):
                    if number == 1 or time.monotonic() < deadline_s:
                        self._visit(workload, self._kept(systems, workload), number)
                if time.monotonic() >= deadline_s:
                    break
                self._say(f"x{self.expand}: round {number}, {deadline_s - time.monotonic():.0f} s left")
            for system in systems.values():
                calibration = system.calibration(self.expand)
                self.calibrations += [calibration] if calibration else []

    def cases(self) -> list[Case]:
        return [
            Case(self.expand, workload, system, tuple(self._rounds[workload, system]))
            for workload, system in self._warm_up
            if (workload, system) in self._rounds  # else it was dropped after the warm-up
        ]

    def bound(self) -> float | None:
        """Return adaptivity_bound() for the measured loads."""
        loads = [workload for workload in dict.fromkeys(name for name, _ in self._warm_up) if workload != BURSTY]
        systems = list(dict.fromkeys(system for _, system in self._warm_up))
        rates = {
            system: [
                statistics.median(
                    r.tokens_per_s for r in self._rounds.get((load, system), [self._warm_up[load, system]])
                )
                for load in loads
            ]
            for system in systems
            if all((load, system) in self._warm_up for load in loads)
        }
        fixed = {system: values for system, values in rates.items() if system.startswith("fixed:")}
        if not fixed or not loads:
            return None
        return adaptivity_bound(fixed, [max(values) for values in zip(*rates.values(), strict=True)])

    def _prepare(self) -> CostTable:
        options = self._options
        self._say(f"x{self.expand}: building and profiling engines")
        num_layers = self.expand * load_model_config(options.checkpoint_dir).num_layers
        build_engines(
            BuildOptions(
                checkpoint_dir=options.checkpoint_dir,
                draft_checkpoint_dir=options.draft_checkpoint_dir,
                output_dir=self._engine_dir,
                max_batch_size=options.max_batch_size,
                max_draft_len=max(8, *options.fixed),
                exit_layers=tuple(sorted({layer for layer in (num_layers // 4, num_layers // 2) if layer > 0})),
                expand=self.expand,
            )
        )
        if options.cost_table is not None:
            table = CostTable.from_json(json.loads(options.cost_table.read_text()))
            self._say(f"x{self.expand}: costs of {table.fingerprint.cpu_model} from {options.cost_table.name}")
            return table
        profile = profile_engine_dir(
            ProfileOptions(self._engine_dir, cores=options.cores, num_threads=options.num_threads)
        )
        for line in profile_lines(profile):
            self._say(f"x{self.expand}: {line}")
        self.cost_error = dict(profile.table.held_out_errors)
        return profile.table

    def _open(self, table: CostTable, stack: ExitStack) -> dict[str, System]:
        systems = {}
        for name, spelling in self._options.systems().items():
            try:
                systems[name] = open_system(name, spelling, self._engine_dir, table, self._options, stack)
            except FaserError as error:
                self.absences.append(f"x{self.expand} {name}: {error}")
                self._say(self.absences[-1])
        return systems

    def _jobs(self, num_jobs: int, seed: int) -> tuple[Job, ...]:
        options = self._options
        return draw_jobs(
            self._prompts.token_ids,
            num_jobs,
            min_tokens=options.min_tokens,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            sampled_share=options.sampled_share,
            seed=seed,
        )

    def _closed_loops(self, number: int) -> list[Workload]:
        """Return closed loops with new requests per round, since the order of ends changes rates by a few percent."""
        options = self._options
        return [
            closed_loop(
                self._jobs(max(options.min_jobs, options.jobs_per_stream * c), options.seed + 10_000 * number + c), c
            )
            for c in options.concurrency
        ]

    def _bursty(self, number: int) -> Workload:
        """Return a trace whose peaks exceed the capacity of `off` in its warm-up at the highest concurrency."""
        options = self._options
        capacity = max(r.tokens_per_s for (_, system), r in self._warm_up.items() if system == OFF)
        tokens_per_job = (options.min_tokens + options.max_tokens) / 2
        peak_rate = options.peak_load * capacity / tokens_per_job
        seed = options.seed + 10_000 * number + 1000
        return bursty(self._jobs(options.num_bursty_jobs, seed), peak_rate, options.swing, seed)

    def _kept(self, systems: dict[str, System], workload: Workload) -> list[System]:
        """Return all systems except fixed lengths that were slow in the warm-up round."""
        fixed = [name for name in systems if name.startswith("fixed:")]
        fixed.sort(key=lambda name: -self._warm_up[workload.name, name].tokens_per_s)
        slow = set(fixed[self._options.num_fixed_kept :])
        return [system for name, system in systems.items() if name not in slow]

    def _visit(self, workload: Workload, systems: list[System], number: int) -> None:
        """Run all systems in turns, in a random order. Round 0 is a warm-up."""
        order = list(systems)
        random.Random(f"{self._options.seed}/{number}/{workload.name}").shuffle(order)
        for system in order:
            system.begin(workload)
        while order:
            for system in list(order):
                ended = system.turn()
                if ended is not None:
                    order.remove(system)
                    self._keep(workload, number, system, *ended)

    def _keep(self, workload: Workload, number: int, system: System, found: Round, result: DriveResult) -> None:
        key = (workload.name, system.name)
        if number:
            self._rounds.setdefault(key, []).append(found)
        else:
            self._warm_up[key] = found
        self._check_tokens(workload, number, system.name, result.token_ids)
        if workload.name == BURSTY:
            self._keep_timeline(system.timeline(self.expand))

    def _keep_timeline(self, timeline: Timeline | None) -> None:
        if timeline is not None:
            self.timelines = [t for t in self.timelines if t.system != timeline.system] + [timeline]

    def _check_tokens(
        self, workload: Workload, number: int, system: str, token_ids: tuple[tuple[int, ...], ...]
    ) -> None:
        reference = self._reference.setdefault((workload.name, number), token_ids)
        where = first_difference(token_ids, reference)
        if where is not None:
            at = f"request {where[0]}, token {where[1]}"
            self.differences.append(f"x{self.expand} {workload.name}, round {number}, {system}: {at}")
            self._say(f"tokens differ: {self.differences[-1]}")


def _options_dict(options: PolicyBenchOptions) -> dict[str, Any]:
    """Return options for JSON, with defaults resolved and without machine-specific folders."""
    values = asdict(replace(options, engines_dir=None)) | {
        "cores": options.pinned_cores(),
        "num_threads": options.threads(),
    }
    del values["command_line"], values["engines_dir"]
    return {name: portable(str(value)) if isinstance(value, Path) else value for name, value in values.items()}
