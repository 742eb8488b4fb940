"""Types of arguments as text, from our records and from nanobind and Python.

Both are reduced to one spelling: no modules, `list` for any sequence, `dict` for any mapping, `X | None` for Optional.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

ANYTHING = "object"  # not recorded or not known
_UNTOLD = frozenset({"", "object", "Any", "handle", "args", "kwargs"})
_SPELLINGS = {
    "Sequence": "list",
    "Iterable": "list",
    "List": "list",
    "Mapping": "dict",
    "Dict": "dict",
    "Tuple": "tuple",
    "NoneType": "None",
}


@functools.cache
def alternatives(text: str) -> frozenset[str]:
    """Split "collections.abc.Sequence[int] | None" into {"list[int]", "None"}; empty for an unknown type."""
    plain = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text.replace(" ", "").strip("'\""))
    plain = re.sub(r"\w+", lambda word: _SPELLINGS.get(word[0], word[0]), plain)
    while True:
        inner = re.fullmatch(r"(?:Optional|Union)\[(.*)\]", plain)
        if inner is None:
            break
        plain = "|".join(split(inner[1], ",")) + ("|None" if plain.startswith("Optional") else "")
    found = frozenset(split(plain, "|"))
    return frozenset() if found & _UNTOLD else found


def annotation_text(annotation: Any) -> str:
    """Return an annotation of Python or nanobind as text; "" if there is none."""
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) and "[" not in repr(annotation) else repr(annotation)


def differ(recorded: str, installed: str, *, may_be_none: bool = False) -> bool:
    """Return True if a value of the recorded type may not be passed. may_be_none: the installed default is None."""
    ours, theirs = alternatives(recorded), alternatives(installed)
    return bool(ours and theirs) and bool(ours - theirs - ({"None"} if may_be_none else set()))


def split(text: str, separator: str) -> list[str]:
    """Split a type's text at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == separator and not depth:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
