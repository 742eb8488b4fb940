"""Reads the fields for structured outputs: OpenAI's response_format and vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.guided.spec import guide_spec
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown

_ANY_OBJECT = '{"type": "object"}'
_TYPES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar", "choice": "regex"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_FORMATS = "text, json_object, json_schema"


def guide_inputs(fields: Fields) -> tuple[str | None, dict[str, str]]:
    """Return the name of the field that constrains the output, and the two Triton inputs for it; else None and {}.

    Raises InvalidArgumentError.
    """
    named = {f"guided_{name}": name for name in _TYPES if f"guided_{name}" in fields}
    guides = {field: _guide(field, name, fields.get(field)) for field, name in named.items()}
    if "response_format" in fields:
        found = _response_format(fields.get("response_format"))
        guides |= {"response_format": found} if found is not None else {}
    if "structured_outputs" in fields:
        guides["structured_outputs"] = _structured_outputs(fields.get("structured_outputs"))
    if not guides:
        return None, {}
    if len(guides) > 1:
        raise RequestError(f"and {' and '.join(sorted(guides)[1:])} were sent; send one of them", min(guides))
    ((field, (guide_type, guide)),) = guides.items()
    return field, checked_guide(field, guide_type, guide)


def checked_guide(field: str, guide_type: str, guide: str) -> dict[str, str]:
    """Return the two Triton inputs of a guide; raise InvalidArgumentError, which names the field."""
    try:
        guide_spec(guide_type, guide)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.message, field, error.value, error.limit) from None
    return {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}


def _response_format(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        raise RequestError(f"is {kind_of(value)}; it must be an object with a type", "response_format")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_schema", _ANY_OBJECT
    if kind != "json_schema":
        raise RequestError(f"is {shown(kind)}, allowed are {_FORMATS}", "response_format.type", param="response_format")
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            f"is {kind_of(schema)}; it must be an object: the JSON schema",
            "response_format.json_schema.schema",
            param="response_format",
        )
    return "json_schema", json.dumps(schema)


def _structured_outputs(value: Any) -> tuple[str, str]:
    names = (*_TYPES, "json_object")
    given = [name for name, entry in value.items() if entry not in (None, False)] if isinstance(value, dict) else []
    if len(given) != 1 or given[0] not in names:
        raise RequestError(
            f"is {shown(value)}; it must be an object with one of {', '.join(names)}", "structured_outputs"
        )
    (name,) = given
    if name == "json_object":
        return "json_schema", _ANY_OBJECT
    return _guide(f"structured_outputs.{name}", name, value[name])


def _guide(field: str, name: str, value: Any) -> tuple[str, str]:
    if name == "json" and isinstance(value, dict):
        return _TYPES[name], json.dumps(value)
    if name == "choice":
        if not isinstance(value, list) or not value:
            raise RequestError(f"is {kind_of(value)}; it must be a list of at least one text", field)
        texts = [checked_text(field, text) for text in value]
        if "" in texts:
            raise RequestError("holds an empty text; leave it out", field)
        return _TYPES[name], "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
    return _TYPES[name], checked_text(field, value)
