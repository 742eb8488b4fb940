"""JSON of files and requests: what json.loads makes of it, within limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.json_text import MAX_DEPTH, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES, st.booleans())
def test_it_reads_what_was_written(value: Any, strict: bool) -> None:
    text = json.dumps(value)
    assert parse_json(text, unique_names=strict, finite=strict) == value
    assert parse_json(text.encode(), unique_names=strict, finite=strict) == value


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_has_a_limit(opening: str, closing: str) -> None:
    def nested(levels: int) -> str:
        number = levels // (2 if opening.startswith("[{") else 1)
        return opening * number + "1" + closing * number

    parse_json(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 2, 900, 400_000):
        with pytest.raises(ValueError, match="nested deeper than 128"):
            parse_json(nested(levels))
    with pytest.raises(ValueError, match="nested deeper"):
        parse_json(b"[" * 200_000)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": [{"c": {"a": 1, "d": 2, "a": 3}}]}'])
def test_names_may_have_to_differ(text: str) -> None:
    parse_json(text)
    with pytest.raises(ValueError, match="it has 'a' twice in one object"):
        parse_json(text, unique_names=True)


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "1e999", "-2.5e400"])
def test_numbers_may_have_to_be_numbers(name: str) -> None:
    parse_json(f"[{name}]")
    with pytest.raises(ValueError, match=f"it has {name}, which is no finite number"):
        parse_json(f"[{name}]", finite=True)
