"""Checks of JSON values that clients send for a chat template or a grammar."""

from __future__ import annotations

import json
from typing import Any

from faser_trtllm.serving.openai.error import RequestError

MAX_DEPTH = 32


def check_json(field: str, value: Any) -> int:
    """Return the number of characters in a JSON value; raise RequestError if it is too deep or not valid in UTF-8."""
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _parts(outer)]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise RequestError(
                f"is nested more than {MAX_DEPTH} levels deep, which is the limit; flatten it", field, limit=MAX_DEPTH
            )
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("has half of a surrogate pair in a string; send whole characters", field) from error
    return len(text)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
