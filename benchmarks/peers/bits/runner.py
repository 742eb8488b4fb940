"""Interleaved rounds of our engine and its peers at equal bits: decode steps by rows, and a prefill."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import CpuMeter, describe_environment, portable
from benchmarks.peers.bits import systems
from benchmarks.peers.bits.machine import Machine, measure_machine
from benchmarks.peers.bits.models import Model, write_random_checkpoint
from benchmarks.peers.bits.options import BitsOptions
from benchmarks.peers.bits.plot import write_plot
from benchmarks.peers.bits.report import PREFILL, BitsReport, Result
from benchmarks.peers.bits.systems import Loaded, Place
from benchmarks.peers.report import FASER
from benchmarks.peers.worker_process import WorkerError

DEMO_TOKENIZER = Path(__file__).parents[3] / "engines/demo/target/tokenizer.json"
Progress = Callable[[str], None]
Times = dict[tuple[str, str], list[float]]  # (system, cell) -> ms of each round


def run_bits(options: BitsOptions, say: Progress) -> BitsReport:
    """Measure, and write bits.json, bits.md and (with matplotlib) bits.png to output_dir after every model and bits.

    A peer that is missing or fails is left out with a sentence; WorkerError if our own engine fails.
    """
    options.validate()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(options.command_line)
    meter = CpuMeter()
    with tempfile.TemporaryDirectory(prefix="faser-bits-") as folder:
        machine = measure_machine(options.threads(), options.pinned_cores(), Path(folder))
        report = BitsReport(environment, _values(options), machine, (), {}, {}, ())
        for model in _models(options, Path(folder)):
            for bits in options.bits:
                with tempfile.TemporaryDirectory(dir=folder) as work_dir:
                    report = _with(report, Place(options, model, bits, Path(work_dir), _files_dir(options, bits)), say)
                environment |= meter.shares()
                _write(report, options.output_dir)
    return report


def _with(report: BitsReport, place: Place, say: Progress) -> BitsReport:
    """Return the report with the results of one model and number of bits."""
    absences = list(report.absences)
    with ExitStack() as stack:
        loaded = _open_all(place, stack, absences, say)
        versions = {name: text for system in loaded.values() for name, text in system.versions.items()}
        report.environment["versions"] |= versions
        bits_per_weight = report.bits_per_weight | {
            f"{place.model.name} {place.bits}, {system.name}": round(system.bits_per_weight, 3)
            for system in loaded.values()
        }
        times = _rounds(place, loaded, absences, say)
        memory = report.memory_gb | {
            f"{place.model.name} {place.bits}, {system.name}": round(system.memory_bytes() / 1e9, 3)
            for system in loaded.values()
        }
    results = report.results + tuple(_results(place, times, report.machine, bits_per_weight))
    return replace(report, results=results, bits_per_weight=bits_per_weight, memory_gb=memory, absences=tuple(absences))


def _files_dir(options: BitsOptions, bits: str) -> Path | None:
    if options.files_dir is None:
        return None
    found = options.files_dir.resolve() / bits
    found.mkdir(parents=True, exist_ok=True)
    return found


def _values(options: BitsOptions) -> dict[str, Any]:
    """Return options for JSON, without machine-specific folders."""
    values = asdict(options) | {"num_threads": options.threads()}
    del values["command_line"], values["files_dir"]
    return {name: portable(str(value)) if isinstance(value, Path) else value for name, value in values.items()}


def _write(report: BitsReport, output_dir: Path) -> None:
    report.write_json(output_dir / "bits.json")
    (output_dir / "bits.md").write_text(report.markdown())
    write_plot(report, output_dir / "bits.png")


def _models(options: BitsOptions, folder: Path) -> list[Model]:
    models = []
    if options.checkpoint_dir is not None:
        path = options.checkpoint_dir.resolve()
        models.append(Model(f"{path.parent.name}/{path.name}", options.checkpoint_dir))
    if options.random:
        models.append(Model("431M, random", write_random_checkpoint(folder / "random", DEMO_TOKENIZER)))
    return models


def _open_all(place: Place, stack: ExitStack, absences: list[str], say: Progress) -> dict[str, Loaded]:
    loaded = {}
    for name, start in systems.openers(place.options, place.bits).items():
        say(f"{place.model.name}, {place.bits}: opening {name}")
        try:
            loaded[name] = start(place)
        except WorkerError as error:
            if name == FASER:
                raise
            _leave_out(place, name, error, absences, say)
            continue
        stack.callback(loaded[name].close)
    return loaded


def _leave_out(place: Place, name: str, error: WorkerError, absences: list[str], say: Progress) -> None:
    absences.append(f"{name} on {place.model.name}: {error}")
    say(absences[-1])


def _rounds(place: Place, loaded: dict[str, Loaded], absences: list[str], say: Progress) -> Times:
    """Run the rounds; the first is dropped, and every other one runs in reverse order."""
    options = place.options
    vocab_size = place.model.config().vocab_size
    times: Times = {}
    for number in range(options.rounds + 1):
        say(f"{place.model.name}, {place.bits}: round {number} of {options.rounds}")
        for cell in (*map(str, options.rows), PREFILL):
            prompts = _prompts(options, cell, vocab_size)
            max_tokens = 1 if cell == PREFILL else 1 + options.steps
            for name in list(loaded)[:: -1 if number % 2 else 1]:
                try:
                    reply = loaded[name].run(prompts, max_tokens)
                except WorkerError as error:
                    if name == FASER:
                        raise
                    _leave_out(place, name, error, absences, say)
                    del loaded[name]
                    times = {key: values for key, values in times.items() if key[0] != name}
                    continue
                if number:
                    clock = "cpu_ms" if options.threads() == 1 else "ms"
                    ms = statistics.median(reply[f"first_{clock}" if cell == PREFILL else f"step_{clock}"])
                    times.setdefault((name, cell), []).append(ms)
    return times


def _prompts(options: BitsOptions, cell: str, vocab_size: int) -> list[list[int]]:
    num_rows, length = (1, options.prefill) if cell == PREFILL else (int(cell), options.prompt_len)
    tokens: list[list[int]] = np.random.default_rng(1).integers(1, vocab_size, (num_rows, length)).tolist()
    return tokens


def _results(place: Place, times: Times, machine: Machine | None, bits_per_weight: dict[str, float]) -> list[Result]:
    model, options = place.model, place.options
    ours = bits_per_weight[f"{model.name} {place.bits}, {FASER}"]
    found = []
    for (name, cell), ms in sorted(times.items(), key=lambda item: item[0][0] != FASER):
        num_rows = options.prefill if cell == PREFILL else int(cell)
        least: tuple[float | None, str] = (None, "")
        if machine is not None and name == FASER:
            flop = model.flop(num_rows, 1 if cell == PREFILL else num_rows)
            least = machine.least_ms(model.num_read(num_rows) * ours / 8, flop)
        found.append(Result(model.name, place.bits, name, cell, num_rows, tuple(ms), *least))
    return found
