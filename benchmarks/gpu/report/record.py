"""The results of a section: values, tables and plots, in a file that is complete after every measurement."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.skipped import Skipped
from benchmarks.policies.report import finite

T = TypeVar("T")


class Record:
    """The record of a section, saved at every change, so that a killed section keeps its results.

    data: "values" (anything of JSON), "tables" ({title, header, rows, note}), "plots" ({title, x, y, log, series}),
    "notes" (a line for each thing that was left out) and "errors" (one line per measurement that failed).
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.data: dict[str, Any] = {"values": {}, "tables": [], "plots": [], "notes": [], "errors": []}

    def value(self, name: str, value: Any) -> None:
        self.data["values"][name] = value
        self.save()

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> None:
        """Add a table, or replace the one with this title."""
        cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
        self._put("tables", {"title": title, "header": list(header), "rows": cells, "note": note})

    def plot(
        self, title: str, x: str, y: str, series: Mapping[str, Mapping[float, float]], *, log_x: bool = True
    ) -> None:
        """Add a line plot, or replace the one with this title. series: label -> {x: y}."""
        lines = {label: [list(points), list(points.values())] for label, points in series.items()}
        self._put("plots", {"title": title, "x": x, "y": y, "log_x": log_x, "series": lines})

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Run one measurement; on failure the reason is recorded, the section continues, and None is returned."""
        try:
            return work()
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            self.error(f"{what}: {type(error).__name__}: {error}")
            return None

    def note(self, line: str) -> None:
        """Record that something was left out for lack of time or memory, which is no failure."""
        self.data["notes"].append(line)
        self.save()

    def error(self, line: str) -> None:
        self.data["errors"].append(line[:600])
        self.save()

    def set(self, name: str, value: Any) -> None:
        """Set the section's own state: status, seconds."""
        self.data[name] = value
        self.save()

    def save(self) -> None:
        if self._path is not None:
            scratch = self._path.with_suffix(".tmp")
            scratch.write_text(json.dumps(finite(self.data)))
            os.replace(scratch, self._path)

    def _put(self, kind: str, item: dict[str, Any]) -> None:
        items = self.data[kind]
        for place, known in enumerate(items):
            if known["title"] == item["title"]:
                items[place] = item
                break
        else:
            items.append(item)
        self.save()
