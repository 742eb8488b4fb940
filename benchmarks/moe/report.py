"""Results of the bench on mixtures as values, JSON and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.stats import summarize
from benchmarks.moe.options import BY_ROWS, OFF, PRICE
from benchmarks.policies.best_rival import MeanRatio, ratio_to_best

WANTED = 0.99  # goal: share of the best of off and the fixed lengths
NUM_COUNTS = 5  # kinds of passes shown per cell


@dataclass(frozen=True)
class Count:
    """Distinct experts of a layer in decode passes of one kind, measured and by the closed form with the profile."""

    num_requests: int
    num_rows: int
    num_passes: int
    measured: float
    predicted: float


@dataclass(frozen=True)
class Cell:
    """A cell. rates: tokens/s of each block after the first, by system. counts: of all systems' passes together."""

    model: str
    acceptance: float
    batch_size: int
    rates: Mapping[str, tuple[float, ...]]
    counts: tuple[Count, ...]

    @property
    def rivals(self) -> list[str]:
        return [name for name in self.rates if name == OFF or name.startswith("fixed:")]

    @property
    def best(self) -> str:
        """The best measured one of off and the fixed lengths."""
        return max(self.rivals, key=lambda name: summarize(self.rates[name]).median)

    def to_best(self, system: str) -> MeanRatio:
        """Return the ratio to the rival that is best in the other blocks."""
        return ratio_to_best(self.rates[system], [self.rates[name] for name in self.rivals])

    def ratio(self, system: str, base: str) -> MeanRatio:
        return ratio_to_best(self.rates[system], [self.rates[base]])

    def prediction_error(self) -> float:
        """Mean relative error of predicted distinct experts over passes."""
        passes = sum(count.num_passes for count in self.counts)
        apart = sum(count.num_passes * abs(count.predicted / count.measured - 1.0) for count in self.counts)
        return apart / passes if passes else math.nan


@dataclass(frozen=True)
class MoeModel:
    """A model. overlap: share of a row's experts that the next row uses, too, on random tokens, the mean over layers.

    profiled: the profile's overlap of any two rows of a request, and of rows of different requests.
    held_out: error of the cost table on held-out points, by kind of pass.
    """

    name: str
    embedding_scale: float
    overlap: float
    profiled: tuple[float, float]
    num_weights: int
    file_bytes: int
    held_out: dict[str, float]


@dataclass(frozen=True)
class MoeReport:
    environment: dict[str, Any]
    options: dict[str, Any]
    models: tuple[MoeModel, ...]
    cells: tuple[Cell, ...]
    minutes: float

    def write(self, output_dir: Path) -> None:
        """Write moe.json and moe.md."""
        data = asdict(self) | {"ratios": [self._ratios(cell) for cell in self.cells]}
        (output_dir / "moe.json").write_text(json.dumps(data, indent=1) + "\n")
        (output_dir / "moe.md").write_text(self.markdown())

    def _ratios(self, cell: Cell) -> dict[str, Any]:
        key = {"model": cell.model, "acceptance": cell.acceptance, "batch_size": cell.batch_size, "best": cell.best}
        return key | {
            f"{system} over {base}": asdict(found)
            for system in (PRICE, BY_ROWS)
            for base, found in (("best", cell.to_best(system)), (OFF, cell.ratio(system, OFF)))
        }

    def markdown(self) -> str:
        env, options = self.environment, self.options
        commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
        lines = [
            "# faser bench moe",
            "",
            f"{env['date']}, {env['cpu']}, {options['num_threads']} threads, {env['os']}{commit}.  ",
            f"Other processes used {100 * env['other_share']:.0f} % of the cores' time, other machines "
            f"{100 * env['steal_share']:.0f} %.  ",
            f"Systems take turns of {options['slice_ms']:g} ms on endless requests, {options['seconds']:g} s of a cell "
            f"for all of them; {options['blocks']} blocks of it are compared after one that warms up. Systems with "
            f"price learn for {options['learning_s']:g} s before. Drafts are of a "
            "tiny dense model and are accepted at random with the probability given (synthetic acceptance: the text "
            "is not the target's); tokens of a pass are those expected of the drafts that it verified.  ",
            f"`{env['command_line']}`, {self.minutes:.1f} minutes.",
        ]
        for model in self.models:
            lines += ["", *self._model(model)]
        return "\n".join(lines) + "\n"

    def _model(self, model: MoeModel) -> list[str]:
        cells = [cell for cell in self.cells if cell.model == model.name]
        errors = ", ".join(f"{kind} {100 * error:.1f} %" for kind, error in sorted(model.held_out.items()))
        return [
            f"## {model.name}: overlap {model.overlap:.2f}",
            "",
            f"{model.num_weights / 1e9:.2f} billion weights, {self.options['quantization']}, a file of "
            f"{model.file_bytes / 1e9:.2f} GB; embedding scale {model.embedding_scale:g}. Cost table's error on "
            f"held-out points: {errors or 'not measured'}.",
            "",
            "Ratios are geometric means over blocks and their standard error; the best of off and the fixed lengths is "
            f"chosen for a block by the others. The goal is at least {WANTED:g} of it.",
            "",
            table(
                ("accepted", "batch", "off, tok/s", "best", "price / best", "price / off", "by rows / best", "wanted"),
                [_ratio_row(cell) for cell in cells],
            ),
            "",
            "Distinct experts of a layer per pass, measured and predicted by the closed form with the profile's "
            f"overlaps ({model.profiled[0]:.2f} of rows of a request, {model.profiled[1]:.2f} of two requests' rows):",
            "",
            table(
                ("accepted", "batch", "requests x rows: measured (predicted)", "mean error"),
                [_count_row(cell) for cell in cells],
            ),
            "",
            "Tokens/s, medians of blocks:",
            "",
            _rates(cells),
        ]


def _ratio_row(cell: Cell) -> Sequence[str]:
    to_best = cell.to_best(PRICE)
    return (
        f"{cell.acceptance:g}",
        str(cell.batch_size),
        f"{summarize(cell.rates[OFF]).median:.0f}",
        cell.best,
        _words(to_best),
        _words(cell.ratio(PRICE, OFF)),
        _words(cell.to_best(BY_ROWS)),
        "yes" if to_best.mean >= WANTED else "**no**",
    )


def _count_row(cell: Cell) -> Sequence[str]:
    most = sorted(cell.counts, key=lambda count: -count.num_passes)[:NUM_COUNTS]
    shown = sorted(most, key=lambda count: (count.num_requests, count.num_rows))
    passes = ", ".join(f"{c.num_requests} x {c.num_rows}: {c.measured:.1f} ({c.predicted:.1f})" for c in shown)
    return (f"{cell.acceptance:g}", str(cell.batch_size), passes, f"{100 * cell.prediction_error():.1f} %")


def _rates(cells: Sequence[Cell]) -> str:
    systems = list(dict.fromkeys(name for cell in cells for name in cell.rates))
    header = ("system", *(f"{cell.acceptance:g}, batch {cell.batch_size}" for cell in cells))
    rows = [
        (name, *(f"{summarize(cell.rates[name]).median:.1f}" if name in cell.rates else "-" for cell in cells))
        for name in systems
    ]
    return table(header, rows)


def _words(ratio: MeanRatio) -> str:
    return f"{ratio.mean:.3f} ± {ratio.error:.3f}"
