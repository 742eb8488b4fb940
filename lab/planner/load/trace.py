"""Traces of requests in CSV files with our columns, Azure's or BurstGPT's."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError

TIMES = ("arrival_s", "at_s", "timestamp", "arrival_time", "time")
PROMPTS = ("num_input_tokens", "prompt_len", "contexttokens", "request tokens", "input_tokens", "input_length")
OUTPUTS = ("num_output_tokens", "output_len", "generatedtokens", "response tokens", "output_tokens", "output_length")
"""Names of a column, in any case."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A row of a trace. where: file and line, for errors. at_s: seconds from any origin. None: no such column."""

    where: str
    at_s: float
    num_input_tokens: int | None
    num_output_tokens: int | None


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Yield rows in the file's order, lazily; InvalidArgumentError names the problem and its line."""
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            names = {name.strip().lower(): name for name in rows.fieldnames or ()}
            at, *lengths = (next((names[n] for n in known if n in names), None) for known in (TIMES, PROMPTS, OUTPUTS))
            if at is None:
                raise missing_column(path, TIMES)
            for row in rows:
                where = f"trace {path.name} line {rows.line_num}"
                num_input, num_output = (None if n is None else _length(where, n, row[n]) for n in lengths)
                yield TraceRow(where, _seconds(where, at, row[at]), num_input, num_output)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is not a CSV file in UTF-8"
        raise InvalidArgumentError(f"trace {path.name} cannot be read: {reason}") from error


def missing_column(path: Path, known: Sequence[str]) -> InvalidArgumentError:
    return InvalidArgumentError(f"trace {path.name} has no column {' or '.join(known)}; add one to its header")


def _seconds(where: str, name: str, text: str | None) -> float:
    """Parse seconds, or a date and time whose fraction may have more digits than datetime supports."""
    try:
        seconds = float(text or "")
    except ValueError:
        head, _, fraction = (text or "").strip().partition(".")
        digits = fraction.partition("+")[0].rstrip("Z")
        try:
            moment = datetime.datetime.fromisoformat(head).replace(tzinfo=datetime.timezone.utc)
            seconds = moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidArgumentError(f"{where}: {name} is {text!r}; it must be seconds or a date and time")
    return seconds


def _length(where: str, name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or int(text) >= 2**31:
        raise InvalidArgumentError(f"{where}: {name} is {text!r}; it must be a whole number")
    return int(text)
