"""`faser bench peers`: interleaved rounds of our settings and of peers, on the same weights, prompts and cores."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.agreement import agreement, first_difference
from benchmarks.common.environment import CpuMeter, describe_environment, portable
from benchmarks.peers import contestant as contestants
from benchmarks.peers.contestant import Contestant, Workplace
from benchmarks.peers.markdown import render_markdown
from benchmarks.peers.options import BenchOptions
from benchmarks.peers.plot import write_plot
from benchmarks.peers.report import (
    FASER,
    Absence,
    BenchReport,
    CaseResult,
    Exactness,
    Form,
    StepResult,
)
from benchmarks.peers.worker_process import WorkerError
from faser_trtllm.errors import CheckpointError, install
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.prompts import PromptSet, draw_prompts

STEP_REPEATS = 30
Progress = Callable[[str], None]
CaseKey = tuple[str, str, int]  # system, setting, batch size


def run_bench(options: BenchOptions, progress: Progress | None = None) -> BenchReport:
    """Measure, then write bench.json, bench.md and (with matplotlib) bench.png into options.output_dir.

    progress is called with one line per stage. Peers that cannot run are listed in the report's absences; if our own
    system cannot run, FaserError says why.
    """
    options.validate()
    say = progress or (lambda line: None)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(options.command_line)
    meter = CpuMeter()
    tokenizer = Tokenizer.load(options.checkpoint_dir)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts = draw_prompts(encode, options.num_prompts, options.prompt_len, options.seed)
    runs = []
    for expand in options.expand:
        with tempfile.TemporaryDirectory(prefix="faser-bench-") as work_dir:
            run = _FormRun(Workplace(options, expand, Path(work_dir)), prompts, say)
            run.measure()
            runs.append(run)
            environment["versions"] |= run.versions
    environment |= meter.shares()
    report = BenchReport(
        environment=environment,
        options=_options_dict(options),
        prompts={
            "num_prompts": options.num_prompts,
            "source": prompts.source,
            "held_out": prompts.held_out,
        },
        forms=tuple(run.form for run in runs),
        cases=tuple(case for run in runs for case in run.cases()),
        steps=tuple(step for run in runs for step in run.steps()),
        exactness=tuple(run.exactness() for run in runs),
        absences=tuple(absence for run in runs for absence in run.absences),
    )
    write_report(report, options.output_dir, say)
    return report


def write_report(report: BenchReport, output_dir: Path, say: Progress) -> None:
    report.write_json(output_dir / "bench.json")
    (output_dir / "bench.md").write_text(render_markdown(report))
    written = "bench.json, bench.md"
    if write_plot(report, output_dir / "bench.png"):
        written += ", bench.png"
    else:
        say(f"no plot, matplotlib is missing: {install('bench')}")
    say(f"wrote {written} to {output_dir}")


class _FormRun:
    """All rounds of one form of the target. Only measure() writes the fields."""

    def __init__(self, workplace: Workplace, prompts: PromptSet, say: Progress) -> None:
        self.form = Form(workplace.expand, workplace.target_config().num_layers)
        self.absences: list[Absence] = []
        self.versions: dict[str, str] = {}
        self._workplace = workplace
        self._options = workplace.options
        self._prompts = prompts.token_ids
        self._say = say
        self._contestants: dict[str, Contestant] = {}
        self._replies: dict[CaseKey, list[dict[str, Any]]] = {}
        self._step_ms: dict[tuple[str, int], list[float]] = {}
        self._difference: str | None = None
        self._reference: list[list[int]] = []

    def measure(self) -> None:
        with ExitStack() as stack:
            self._open_all(stack)
            self._say(f"{self.form.label}: warm-up")
            self._round(keep=False)
            for number in range(1, self._options.rounds + 1):
                self._say(f"{self.form.label}: round {number} of {self._options.rounds}")
                self._round(keep=True, backwards=number % 2 == 0)
                self._round_steps()

    def cases(self) -> list[CaseResult]:
        return [self._result(key, replies) for key, replies in self._replies.items()]

    def steps(self) -> list[StepResult]:
        return [
            StepResult(self.form.expand, system, num_rows, tuple(values))
            for (system, num_rows), values in self._step_ms.items()
        ]

    def exactness(self) -> Exactness:
        ours = [key for key in self._replies if key[0] == FASER]
        return Exactness(self.form.expand, len(ours), len(self._prompts), self._difference)

    def _open_all(self, stack: ExitStack) -> None:
        workplace, options = self._workplace, self._options
        self._say(f"{self.form.label}: building engines and starting systems")
        self._add(stack, contestants.open_faser(workplace))
        if "transformers" in options.peers:
            self._try(
                stack,
                "transformers",
                contestants.TRANSFORMERS_FIX,
                lambda: contestants.open_transformers(workplace),
            )
        if "openvino" in options.peers:
            self._try(stack, "openvino", contestants.OPENVINO_FIX, lambda: contestants.open_openvino(workplace))
        if "llama.cpp" in options.peers:
            for dtype in options.llamacpp_dtypes:
                self._try_llamacpp(stack, dtype)
        for name, contestant in self._contestants.items():
            self._say(f"{name}: {contestant.versions}")

    def _try_llamacpp(self, stack: ExitStack, dtype: str) -> None:
        """Open llama.cpp, without repacked weights if its AMX path crashes (llama.cpp issue 20824)."""
        name, fix = f"llama.cpp {dtype}", contestants.LLAMACPP_FIX

        def open_probed(use_extra_bufts: bool) -> Contestant:
            contestant = contestants.open_llamacpp(self._workplace, dtype, use_extra_bufts)
            try:
                contestant.run("generate", 1, self._prompts[:1], 2)
            except WorkerError:
                contestant.close()
                raise
            return contestant

        def open_either() -> Contestant:
            try:
                return open_probed(True)
            except WorkerError as error:
                if error.missing:
                    raise
                contestant = open_probed(False)
                self._absent(name, f"runs without repacked weights, with them {error}", "another llama.cpp build")
                return contestant

        self._try(stack, name, fix, open_either)

    def _try(self, stack: ExitStack, name: str, fix: str, start: Callable[[], Contestant]) -> None:
        try:
            self._add(stack, start())
        except WorkerError as error:
            self._absent(name, str(error), fix if error.missing else "see the reason")
        except CheckpointError as error:
            self._absent(name, str(error), "this peer runs Llama checkpoints only")

    def _add(self, stack: ExitStack, contestant: Contestant) -> None:
        stack.callback(contestant.close)
        self._contestants[contestant.name] = contestant
        self.versions |= contestant.versions

    def _absent(self, name: str, reason: str, fix: str) -> None:
        self._say(f"{name}: {reason} ({fix})")
        self.absences.append(Absence(self.form.expand, name, reason, fix))

    def _drop(self, name: str, error: WorkerError) -> None:
        """Drop a peer that fails once, since medians over fewer rounds are not comparable."""
        if name == FASER:
            raise error
        self._absent(name, str(error), "see the reason")
        self._contestants.pop(name).close()
        self._replies = {key: replies for key, replies in self._replies.items() if key[0] != name}
        self._step_ms = {key: values for key, values in self._step_ms.items() if key[0] != name}

    def _keys(self) -> list[CaseKey]:
        return [
            (contestant.name, setting, batch_size)
            for batch_size in self._options.batch_sizes
            for contestant in self._contestants.values()
            for setting in contestant.settings(self._options, batch_size)
        ]

    def _round(self, keep: bool, backwards: bool = False) -> None:
        keys = self._keys()
        for key in reversed(keys) if backwards else keys:
            name, setting, batch_size = key
            if name not in self._contestants:
                continue
            try:
                reply = self._contestants[name].run(setting, batch_size, self._prompts, self._options.max_tokens)
            except WorkerError as error:
                self._drop(name, error)
                continue
            if name == FASER:
                self._check_tokens(key, reply["token_ids"])
            if keep:
                self._replies.setdefault(key, []).append(reply)

    def _round_steps(self) -> None:
        if not self._options.step_rows:
            return
        for name in [name for name, contestant in self._contestants.items() if contestant.has_steps]:
            try:
                steps_ms = self._contestants[name].steps_ms(self._options.step_rows, STEP_REPEATS)
            except WorkerError as error:
                self._drop(name, error)
                continue
            for num_rows, ms in steps_ms.items():
                self._step_ms.setdefault((name, num_rows), []).append(ms)

    def _check_tokens(self, key: CaseKey, token_ids: list[list[int]]) -> None:
        """Check that a case repeats the tokens of our first one (off at the first batch size) in every round."""
        if not self._reference:
            self._reference = token_ids
        where = first_difference(token_ids, self._reference)
        if where is not None and self._difference is None:
            self._difference = f"{key[1]} at batch size {key[2]}, prompt {where[0]}, token {where[1]}"
            self._say(f"{self.form.label}: tokens differ: {self._difference}")

    def _result(self, key: CaseKey, replies: list[dict[str, Any]]) -> CaseResult:
        system, setting, batch_size = key
        num_tokens = [sum(map(len, reply["token_ids"])) for reply in replies]
        seconds = [sum(reply["seconds"]) for reply in replies]

        def total(name: str) -> int:
            return sum(reply[name] for reply in replies)

        return CaseResult(
            expand=self.form.expand,
            system=system,
            setting=setting,
            batch_size=batch_size,
            tokens_per_s=tuple(count / wall for count, wall in zip(num_tokens, seconds, strict=True)),
            seconds=sum(seconds),
            num_output_tokens=sum(num_tokens),
            num_target_passes=total("num_target_passes"),
            num_draft_tokens=total("num_draft_tokens"),
            num_accepted_tokens=total("num_accepted_tokens"),
            agreement=agreement(replies[-1]["token_ids"], self._reference),
            times_ms={phase: sum(reply["times_ms"][phase] for reply in replies) for phase in replies[0]["times_ms"]},
        )


def _options_dict(options: BenchOptions) -> dict[str, Any]:
    """Return options for JSON, with defaults resolved and without machine-specific folders."""
    values = asdict(options) | {"cores": options.pinned_cores(), "num_threads": options.threads()}
    del values["command_line"]
    return {name: portable(str(value)) if isinstance(value, Path) else value for name, value in values.items()}
