"""Parses calls with parameters in tags: <function=NAME>, <parameter=KEY>, a value, </parameter> ... </function>.

Each value becomes JSON once it is complete. It is a string if the function's schema calls the parameter a string or
does not have it; otherwise it is the model's own text if that is JSON of the right type, and a string if not. A value
ends at the first </parameter>; a line break at either end is removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from faser_trtllm.json_text import parse_json
from faser_trtllm.serving.parsers.reader import EndOfTextError, MalformedError, Marks, Reader, Reading
from faser_trtllm.serving.parsers.sink import Sink

_MAX_NAME_CHARS = 1024
_MAX_DEPTH = 4  # levels of a value's schema down to its types
_MAX_PARTS = 16
_END = "</parameter>"
_MARKS = Marks(_END)
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # in lower case, so Python's words count


def read_xml_call(reader: Reader, sink: Sink, functions: Mapping[str, Mapping[str, Any]]) -> Reading[None]:
    """Read a call of one of the functions. Raises MalformedError or EndOfTextError."""
    yield from reader.expect("<function=")
    name = (yield from reader.until(">", _MAX_NAME_CHARS)).strip()
    yield from reader.expect(">")
    if name not in functions:
        raise MalformedError
    reader.forget()
    sink.start(name)
    properties = functions[name].get("properties")
    before = "{"
    while True:
        reader.hold()
        try:
            if (yield from reader.accept("</function>")):
                break
            yield from reader.expect("<parameter=")
            key = (yield from reader.until(">", _MAX_NAME_CHARS)).strip()
            yield from reader.expect(">")
            value = yield from _value(reader)
        except EndOfTextError:
            reader.forget()
            raise
        schema = properties.get(key) if isinstance(properties, dict) else None
        sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {to_json(value, schema, functions[name])}")
        before = ", "
    reader.forget()
    sink.arguments("{}" if before == "{" else "}")


def to_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Convert a value to JSON. schema: the value's, or None. root: the schema of all arguments."""
    types = _types(schema, root)
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word == "null" and ("null" in types or not types & {"string", ""}):
        return word
    if not types & {"string", ""}:
        try:
            candidate = word or bare
            if _has_type(parse_json(candidate, finite=True), types):
                return candidate
        except ValueError:
            pass
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Mapping[str, Any], depth: int = _MAX_DEPTH) -> set[str]:
    """Return the types that a schema allows, with "" if one of its parts does not state a type."""
    if not isinstance(schema, dict) or not depth:
        return {""}
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {kind for kind in stated if isinstance(kind, str)} or {""}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(reference, root), root, depth - 1)
    parts = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(parts, list) and 0 < len(parts) <= _MAX_PARTS:
        return {kind for part in parts for kind in _types(part, root, depth - 1)}
    return {""}


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a $ref names, or None if it is not among the definitions."""
    place, _, name = reference.rpartition("/")
    definitions = root.get(place.removeprefix("#/")) if place in ("#/$defs", "#/definitions") else None
    return definitions.get(name) if isinstance(definitions, dict) else None


def _has_type(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and "number" not in types:
        return "integer" in types and value.is_integer()
    return any(isinstance(value, _KINDS.get(kind, ())) for kind in types)


def _value(reader: Reader) -> Reading[str]:
    pieces: list[str] = []
    while True:
        place, is_found = _MARKS.find(reader.text, reader.at)
        pieces.append(reader.take(place))
        if is_found:
            reader.take(place + len(_END))
            return "".join(pieces).removeprefix("\n").removesuffix("\n")
        yield from reader.more()
