"""A JSON parser for files and requests, with limits that json.loads lacks, and an atomic writer for files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Limit on nested objects and arrays: more than any file or request needs, and far enough below Python's own limit that
a parsed value can also be compared, printed and written."""


def parse_json(text: str | bytes, *, unique_names: bool = False, finite: bool = False) -> Any:
    """Parse a JSON text; raise ValueError if it is malformed or nested deeper than MAX_DEPTH.

    unique_names: refuse a name that occurs twice in one object. finite: refuse NaN and Infinity, which Python adds to
    JSON, and numbers that overflow to Infinity.
    """
    hook = _unique if unique_names else None
    try:
        constant, number = (_refuse, _finite) if finite else (None, None)
        value = json.loads(text, object_pairs_hook=hook, parse_constant=constant, parse_float=number)
        is_too_deep = _is_deeper(value, MAX_DEPTH)
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} objects and arrays")
    return value


def write_json(data: Mapping[str, object], path: Path) -> None:
    """Write a JSON file atomically; raise OSError if its directory is not writable."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        staged.write_text(json.dumps(data, indent=1) + "\n")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name!r:.80} twice in one object")
        found[name] = value
    return found


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text[:40])


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is no finite number")
