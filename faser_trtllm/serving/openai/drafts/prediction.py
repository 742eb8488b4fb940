"""Reads OpenAI's field `prediction`: text that the client expects, used as draft tokens without a draft model."""

from __future__ import annotations

from typing import Any

from faser_trtllm.core.sampling_params import check_count
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown
from faser_trtllm.serving.text.request import MAX_PREDICTION_CHARS

MAX_PARTS = 64


def prediction_inputs(fields: Fields) -> dict[str, Any]:
    """Return the Triton input `prediction`, {} without the field or its text; raise InvalidArgumentError."""
    value = fields.get("prediction")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f'is {kind_of(value)}; it must be {{"type": "content", "content": TEXT}}', "prediction")
    for name in value:
        if name not in ("type", "content"):
            raise RequestError(f"has {shown(name)}, allowed are type and content", "prediction")
    if value.get("type") != "content":
        raise RequestError(f"is {shown(value.get('type'))}, allowed is content", "prediction.type")
    content = value.get("content")
    parts = content if isinstance(content, list) else [content]
    check_count("prediction.content", len(parts), MAX_PARTS, "parts")
    texts = [_text_of(part) for part in parts]
    check_count("prediction", sum(map(len, texts)), MAX_PREDICTION_CHARS, "characters")
    return {"prediction": "".join(texts)} if any(texts) else {}


def _text_of(part: Any) -> str:
    if isinstance(part, dict):
        if part.get("type") != "text":
            raise RequestError(f"has a part of type {shown(part.get('type'))}, allowed is text", "prediction.content")
        part = part.get("text")
    return checked_text("prediction.content", part)
