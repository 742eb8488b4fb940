"""Grammars of arguments in tags, as Qwen3-Coder writes them: <parameter=KEY>, a line with the value, </parameter>.

A string parameter is written as its text, so a grammar can only enforce its length or that it is one of given texts.
Other parameters are JSON. Parameters are in the order of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_END = "</parameter>"
_SCHEMA_KEYS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "description",
        "title",
        "$schema",
    )
)
_STRING_KEYS = frozenset(("type", "enum", "const", "minLength", "maxLength", "description", "title", "default"))
_JSON_TYPES = frozenset(("object", "array", "number", "integer", "boolean", "null"))
_NULLS = ("null", "none")
_TEXT_TYPES = (frozenset(("string",)), frozenset(("string", "null")))

LOOSE = f"""loose: ("<parameter=" /[^>\\n]{{1,64}}/ ">" loose_value /\\n?/)*
loose_value[lazy]: TEXT "{_END}"
"""
"""Rules for any arguments."""


def tagged_arguments(
    name: str, schema: Mapping[str, Any], spell: Callable[[Mapping[str, Any]], str]
) -> tuple[str, str | None]:
    """Return rules, of which `name` is for the arguments, and the parameter whose schema cannot be enforced, if any.

    spell: turns a JSON schema into a part of a rule.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not schema.keys() <= _SCHEMA_KEYS:
        return "", "parameters"
    if not all(isinstance(key, str) and key in properties for key in required):
        return "", "required"
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules, names = [], []
    for i, (key, one) in enumerate(properties.items()):
        value = _value(f"{name}_{i}", _resolved(one, schema), defined, spell)
        if value is None or key.strip() != key or ">" in key or "\n" in key:
            return "", key
        rules.append(value)
        tag = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        names.append(f'{tag} {name}_{i} "\\n"' if key in required else f'({tag} {name}_{i} "\\n")?')
    return f"{name}: {' '.join(names)}\n{''.join(rules)}", None


def _value(name: str, schema: Any, defined: Mapping[str, Any], spell: Callable[[Mapping[str, Any]], str]) -> str | None:
    types = _types(schema)
    if types in _TEXT_TYPES:
        return _text(name, schema, types)
    if types and types <= _JSON_TYPES:
        return f'{name}: {spell({**schema, **defined})} "\\n{_END}"\n'
    return None


def _text(name: str, schema: Mapping[str, Any], types: frozenset[str]) -> str | None:
    """Return the rule of a string, or of a string or null; None if its schema cannot be enforced."""
    parts = _parts(schema)
    if (not parts and "anyOf" in schema) or not all(part.keys() <= _STRING_KEYS for part in parts):
        return None
    if not schema.keys() <= _STRING_KEYS | {"anyOf"}:
        return None
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if texts is not None:
        if not isinstance(texts, list) or not all(
            isinstance(text, str) and _END not in text and text.strip("\n") == text for text in texts
        ):
            return None
        if "null" in types and any(text.strip().lower() in _NULLS for text in texts):  # the parser makes it null
            return None
        found = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return f'{name}: ({found}) "\\n{_END}"\n'
    if any(part.keys() & {"enum", "const", "minLength", "maxLength"} for part in parts):
        return None
    if not low and high is None:
        return f'{name}[lazy]: TEXT "{_END}"\n'
    if "null" in types or not isinstance(low, int) or not isinstance(high, int | None):
        return None
    length = f"{{{low},{'' if high is None else high}}}"
    token = name.upper()
    return f'{name}: {token} "\\n{_END}"\n{token}: /(.|\\n){length}/ & ~/(?s:.*)<\\/parameter>(?s:.*)/\n'


def _types(schema: Any) -> frozenset[str]:
    """Return the types that a schema states; empty if one of its parts does not state any."""
    if not isinstance(schema, dict):
        return frozenset()
    stated = schema.get("type")
    if stated is not None:
        kinds = stated if isinstance(stated, list) else [stated]
        return frozenset(kinds) if all(isinstance(kind, str) for kind in kinds) else frozenset()
    parts = [_types(part) for part in _parts(schema)]
    return frozenset().union(*parts) if parts and all(parts) else frozenset()


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of anyOf; empty if it is no list of objects."""
    parts = schema.get("anyOf", [])
    return parts if isinstance(parts, list) and all(isinstance(part, dict) for part in parts) else []


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Resolve a reference to a schema of strings; the parser treats other references as strings too."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    place, _, key = reference.rpartition("/") if isinstance(reference, str) else ("", "", "")
    if place in ("#/$defs", "#/definitions"):
        defined = root.get(place.removeprefix("#/"))
        found = defined.get(key) if isinstance(defined, dict) else None
    else:
        found = schema
    return schema if _types(found) != _TEXT_TYPES[0] else found
