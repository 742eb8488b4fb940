"""Reads the messages of a chat into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from faser_trtllm.core.sampling_params import check_count
from faser_trtllm.serving.openai.chat.json_value import check_json
from faser_trtllm.serving.openai.chat.tools import checked_name
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 1024
MAX_CALLS = 128
MAX_ID_CHARS = 256

Message = Mapping[str, Any]
"""Has role and content; a message of the assistant may have tool_calls, whose arguments are objects."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING = ("reasoning_content", "reasoning")  # templates read the first name, vLLM's clients send the second


def read_messages(value: Any) -> list[Message]:
    """Read the field `messages`; raise InvalidArgumentError."""
    if value is None:
        raise RequestError("is missing, send a list of messages", "messages")
    if not isinstance(value, list) or not value:
        raise RequestError("must be a list of at least one message", "messages")
    check_count("messages", len(value), MAX_MESSAGES)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise RequestError(f"is {kind_of(value)}; it must be an object with role and content", where)
    fields = Fields(value)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"is {shown(role)}, allowed are {', '.join(_ROLES)}", f"{where}.role")
    for name in ("function_call", "audio"):
        if fields.get(name):
            raise RequestError("was sent, but only text and tool_calls are supported; leave it out", f"{where}.{name}")
    calls = fields.get("tool_calls")
    if calls and role != "assistant":
        raise RequestError(f"was sent with the role {role}; only the assistant calls tools", f"{where}.tool_calls")
    message: dict[str, Any] = {"role": _ROLES[role]}
    reasoning = next((fields.get(name) for name in _REASONING if name in fields), None)
    if role == "assistant" and (calls or reasoning) and fields.get("content") in (None, []):
        message["content"] = ""
    else:
        message["content"] = _content(f"{where}.content", fields.get("content"))
    if "name" in fields:
        message["name"] = checked_text(f"{where}.name", fields.get("name"))
    if role == "tool":
        message["tool_call_id"] = _id(f"{where}.tool_call_id", fields.get("tool_call_id"))
    if reasoning is not None and role == "assistant":
        message |= dict.fromkeys(_REASONING, checked_text(f"{where}.reasoning_content", reasoning))
        if not (calls and message["content"]):
            message["thinking"] = reasoning  # gpt-oss's name; its template refuses it with both content and calls
    if calls:
        message["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return message


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return checked_text(where, value)
    if not isinstance(value, list) or not value or len(value) > MAX_CONTENT_PARTS:
        raise RequestError(f"is {kind_of(value)}; it must be a text or 1 to {MAX_CONTENT_PARTS} text parts", where)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"has a part of type {shown(kind)}, allowed is text", where)
        texts.append(checked_text(where, part.get("text")))
    return "".join(texts)


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError(f"is {kind_of(value)}; it must be a list", where)
    check_count(where, len(value), MAX_CALLS)
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(value)]


def _call(where: str, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise RequestError("must be an object with id, type function, and function", where)
    name = checked_name(f"{where}.function.name", function.get("name"))
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    call_id = _id(f"{where}.id", value.get("id"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(where: str, value: Any) -> Any:
    """Parse arguments into an object, since templates write them as the model writes calls."""
    text = checked_text(where, "" if value is None else value)
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"is {shown(text)}; it must be the text of a JSON object, such as {{}}", where)
    check_json(where, found)
    return found


def _id(where: str, value: Any) -> str:
    found = checked_text(where, value)
    check_count(where, len(found), MAX_ID_CHARS, "characters")
    return found
