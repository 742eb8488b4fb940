"""The results at equal bits as values, JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.stats import Summary, paired_ratio, summarize
from benchmarks.peers.bits.machine import Machine
from benchmarks.peers.report import FASER

PREFILL = "prefill"
WANTED = {PREFILL: 1.0}  # goals for the best peer's time over ours
WANTED_DECODE = 1.1
CLOCKS = ("Wall time.", "CPU time of each system's process, which other work disturbs least.")


@dataclass(frozen=True)
class Result:
    """A system in one cell. cell: "prefill" or a number of rows. ms: a decode step or the prefill, per round.

    num_tokens: tokens of a step or prefill. bound_ms: the machine's limit for our engine, by its file's bits and its
    kernels' products, None if unknown; bound: "memory" or "arithmetic".
    """

    model: str
    bits: str
    system: str
    cell: str
    num_tokens: int
    ms: tuple[float, ...]
    bound_ms: float | None = None
    bound: str = ""

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.num_tokens / summarize(self.ms).median


@dataclass(frozen=True)
class BitsReport:
    """The report. bits_per_weight: of files by model, bits and system. memory_gb: of processes, with the same keys.

    absences: a sentence for each.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    machine: Machine | None
    results: tuple[Result, ...]
    bits_per_weight: dict[str, float]
    memory_gb: dict[str, float]
    absences: tuple[str, ...]

    def cells(self) -> Iterable[tuple[Result, list[Result]]]:
        """Yield our result and the peers' in the same cell."""
        for ours in self.results:
            if ours.system == FASER:
                key = (ours.model, ours.bits, ours.cell)
                rivals = [r for r in self.results if (r.model, r.bits, r.cell) == key and r.system != FASER]
                yield ours, rivals

    def write_json(self, path: Path) -> None:
        data = asdict(self) | {
            "results": [asdict(r) | {"tokens_per_s": r.tokens_per_s} for r in self.results],
            "ratios": [
                {"model": ours.model, "bits": ours.bits, "cell": ours.cell, "peer": rival.system}
                | asdict(ratio(rival, ours))
                for ours, rivals in self.cells()
                for rival in rivals
            ],
        }
        path.write_text(json.dumps(data, indent=2) + "\n")

    def markdown(self) -> str:
        """Return Markdown with peers' times over ours, as medians of ratios per round."""
        env, options = self.environment, self.options
        versions = ", ".join(f"{name} {version}" for name, version in sorted(env["versions"].items()))
        lines = [
            "# Peers at equal bits",
            "",
            f"{env['date']}, {env['cpu']}, {options['num_threads']} threads, {env['os']}; {versions}.  ",
            f"Other processes used {100 * env['other_share']:.0f} % of the cores' time, other machines "
            f"{100 * env['steal_share']:.0f} %.  ",
            f"Medians of {options['rounds']} interleaved rounds after one that is dropped; in each the median of "
            f"{options['steps']} decode steps of rows sequences after prompts of {options['prompt_len']} tokens, "
            f"and the first token after {options['prefill']}. {CLOCKS[options['num_threads'] == 1]}",
        ]
        if self.machine is not None:
            lines[-1] += (
                f" A loop in C reads {self.machine.read_gb_per_s:.1f} GB/s and computes "
                f"{self.machine.gflop_per_s:.0f} GFLOP/s here."
            )
        lines.append(f"  \n`{env['command_line']}`")
        lines += [f"\nNot run: {absence}." for absence in self.absences]
        for model in dict.fromkeys(result.model for result in self.results):
            lines += ["", f"## {model}", "", self._table(model)]
        files = ", ".join(f"{name}: {bits:.2f}" for name, bits in self.bits_per_weight.items())
        memory = ", ".join(f"{name}: {gb:.2f}" for name, gb in self.memory_gb.items())
        lines += ["", f"Bits per weight of the files: {files}.", "", f"Resident memory of the processes, GB: {memory}."]
        return "\n".join(lines) + "\n"

    def _table(self, model: str) -> str:
        header = ("bits", "cell", "ours, tokens/s", "of the bound", "peer's time over ours", "wanted")
        rows = []
        for ours, rivals in self.cells():
            if ours.model != model:
                continue
            wanted = WANTED.get(ours.cell, WANTED_DECODE)
            ratios = {rival.system: ratio(rival, ours) for rival in rivals}
            least = min((r.median for r in ratios.values()), default=None)
            rows.append(
                (
                    ours.bits,
                    ours.cell if ours.cell == PREFILL else f"{ours.cell} rows",
                    f"{ours.tokens_per_s:.0f}",
                    f"{100 * ours.bound_ms / summarize(ours.ms).median:.0f} % ({ours.bound})" if ours.bound_ms else "-",
                    ", ".join(f"{name} {r.median:.2f} ({r.low:.2f} to {r.high:.2f})" for name, r in ratios.items()),
                    "-" if least is None else f"{wanted:g}: {'yes' if least >= wanted else '**no**'}",
                )
            )
        return table(header, rows)


def ratio(rival: Result, ours: Result) -> Summary:
    """Return the rival's time over ours, above 1 if we are faster."""
    return paired_ratio(rival.ms, ours.ms)
