"""Read the prompts of published benchmarks from local files in their published formats."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.errors import InvalidArgumentError, reason_of
from faser_trtllm.json_text import parse_json

MAX_BYTES = 1 << 30  # of an unpacked file; ShareGPT has 0.7 GB
MAX_LINE_BYTES = 16 << 20
MAX_ROWS = 1_000_000
MAX_TURNS = 128
MAX_OUTPUT_LEN = 1 << 20
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""The placeholder that SPEED-Bench publishes for a text that may not be passed on."""

Message = dict[str, str]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One entry of a dataset.

    turns: the user's messages, one request each. history: messages before the first turn.
    output_len: tokens of each answer in the file, None if unknown. reference: the first answer in the file.
    """

    turns: tuple[str, ...]
    category: str
    history: tuple[Message, ...] = ()
    output_len: int | None = None
    reference: str | None = None


def read_dataset(name: str, path: Path) -> list[Conversation]:
    """Return a file's conversations in order. name: one of DATASETS. InvalidArgumentError names file, row and field."""
    rows, convert = DATASETS[name]
    where = f"the {name} dataset {path.name}"
    try:
        found = [made for place, row in rows(path, where) if (made := convert(row, place)) is not None]
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgumentError(f"{where} cannot be read: {reason_of(error)}; give a file as published") from error
    if not found:
        raise InvalidArgumentError(f"{where} has no prompts; give another file")
    return found


# files


def _lines(path: Path, where: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSONL file, which may be gzipped, with their places."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        size = number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            size += len(line)
            if number == 1 and line.startswith(b"PAR1"):
                raise InvalidArgumentError(f"{where} is a Parquet file; convert it to JSONL, one row a line")
            if len(line) > MAX_LINE_BYTES or size > MAX_BYTES or number > MAX_ROWS:
                limits = f"{MAX_LINE_BYTES >> 20} MiB a line, {MAX_BYTES >> 30} GiB and {MAX_ROWS} lines"
                raise InvalidArgumentError(f"{where} line {number} is beyond {limits}; split the file")
            if line.strip():
                place = f"{where} line {number}"
                yield place, _row(_parsed(line, place), place)


def _array(path: Path, where: str) -> Iterator[tuple[str, Row]]:
    """Yield the entries of a file with one JSON array, with their places."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidArgumentError(f"{where} has more than {MAX_BYTES >> 30} GiB; split the file")
    entries = _parsed(data, where)
    if not isinstance(entries, list) or len(entries) > MAX_ROWS:
        raise InvalidArgumentError(f"{where} must be a JSON array of at most {MAX_ROWS} conversations")
    for number, entry in enumerate(entries):
        yield f"{where} entry {number}", _row(entry, f"{where} entry {number}")


def _parsed(data: bytes, where: str) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise InvalidArgumentError(f"{where} is no JSON ({error}); give a file as published") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where} is {_short(value)}; it must be an object")
    return value


# rows


def _questions(row: Row, where: str) -> Conversation:
    """Convert a row of Spec-Bench, MT-Bench or SPEED-Bench: `turns`, or `messages` as prepared for SPEED-Bench."""
    category = _text(row.get("category", "all"), "category", where)
    if "turns" in row or "messages" not in row:
        turns = _list(row.get("turns"), "turns", where)
        return Conversation(tuple(_prompt(turn, f"turns[{i}]", where) for i, turn in enumerate(turns)), category)
    messages = []
    for i, message in enumerate(_list(row["messages"], "messages", where)):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            raise InvalidArgumentError(f"{where}: messages[{i}] must have a role: system, user or assistant")
        messages.append({"role": role, "content": _prompt(message.get("content"), f"messages[{i}].content", where)})
    if messages[-1]["role"] != "user":
        raise InvalidArgumentError(f"{where}: messages must end with one of the user")
    # Without answers the user's messages are turns; with one, all messages before the last are history.
    said = [i for i, message in enumerate(messages) if message["role"] != "user"]
    first = len(messages) - 1 if any(messages[i]["role"] == "assistant" for i in said) else len(said)
    turns = [message["content"] for message in messages[first:]]
    return Conversation(tuple(turns), category, tuple(messages[:first]))


def _human_eval(row: Row, where: str) -> Conversation:
    return Conversation((_prompt(row.get("prompt"), "prompt", where),), "humaneval")


def _share_gpt(row: Row, where: str) -> Conversation | None:
    """Convert the first exchange, as in vLLM's benchmark; None for an entry without one, which vLLM skips, too."""
    said = row.get("conversations")
    if not isinstance(said, list) or len(said) < 2:
        return None
    prompt, answer = (
        _text(_row(said[i], f"{where}: conversations[{i}]").get("value"), f"conversations[{i}].value", where)
        for i in range(2)
    )
    return Conversation((prompt,), "sharegpt", reference=answer) if prompt else None


def _custom(row: Row, where: str) -> Conversation:
    """Convert a row of vLLM's custom dataset: `prompt`, optional `output_tokens`, and our own `category`."""
    length = row.get("output_tokens")
    if length is not None and not (type(length) is int and 1 <= length <= MAX_OUTPUT_LEN):
        raise InvalidArgumentError(f"{where}: output_tokens is {_short(length)}; it must be 1 to {MAX_OUTPUT_LEN}")
    category = _text(row.get("category", "all"), "category", where)
    return Conversation((_prompt(row.get("prompt"), "prompt", where),), category, output_len=length)


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TURNS:
        raise InvalidArgumentError(f"{where}: {name} is {_short(value)}; it must be a list of 1 to {MAX_TURNS}")
    return value


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{where}: {name} is {_short(value)}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{where}: {name} has half of a surrogate pair; it must be Unicode text") from None
    return value


def _prompt(value: Any, name: str, where: str) -> str:
    text = _text(value, name, where)
    if PLACEHOLDER in text:
        raise InvalidArgumentError(
            f"{where}: {name} is a placeholder for a text that may not be passed on; run the script with which "
            "SPEED-Bench is prepared, or choose another --category"
        )
    if not text:
        raise InvalidArgumentError(f"{where}: {name} is empty; it must be a text")
    return text


def _short(value: Any) -> str:
    return f"{value!r:.60}" if not isinstance(value, dict | list) else f"a {type(value).__name__} of {len(value)}"


DATASETS: dict[str, tuple[Callable[[Path, str], Iterator[tuple[str, Row]]], Callable[[Row, str], Conversation | None]]]
DATASETS = {
    "spec_bench": (_lines, _questions),
    "speed_bench": (_lines, _questions),
    "mt_bench": (_lines, _questions),
    "humaneval": (_lines, _human_eval),
    "sharegpt": (_array, _share_gpt),
    "custom": (_lines, _custom),
}
