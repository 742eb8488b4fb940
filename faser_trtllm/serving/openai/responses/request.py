"""Translates a body of /v1/responses into one of /v1/chat/completions, and its errors back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from faser_trtllm.core.sampling_params import check_count
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.serving.client import ResponseError
from faser_trtllm.serving.openai.chat.message import MAX_CONTENT_PARTS, MAX_MESSAGES
from faser_trtllm.serving.openai.chat.tools import MAX_TOOLS
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown
from faser_trtllm.serving.openai.request import GenerationRequest, StreamOptions, parse_chat
from faser_trtllm.serving.openai.served_model import ServedModel

_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key"),
)
"""Fields with the same meaning in both APIs."""

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "nothing is stored here; send the whole conversation as input"),
    "conversation": ((), "nothing is stored here; send the whole conversation as input"),
    "prompt": ((), "prompts are not stored here; send instructions and input"),
    "background": ((False,), "nothing runs in the background; use stream"),
    "truncation": (("disabled",), "nothing is left out of an input; shorten it"),
    "top_logprobs": ((0,), "log probs are not supported here; use /v1/chat/completions"),
    "max_tool_calls": ((), "this server does not call tools itself"),
    "context_management": (([],), "nothing is left out of an input; shorten it"),
}
"""Unsupported fields: the values that have no effect, and why others are refused."""

MAX_METADATA, MAX_METADATA_CHARS = 16, 64 + 512  # OpenAI's limits: pairs, and characters of a pair
_INCLUDE = ("reasoning.encrypted_content",)  # has no effect: reasoning is not encrypted
_TRANSLATED = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning")
_KNOWN = frozenset((*_SAME, *_TRANSLATED, *_REFUSED, "include", "stream_options"))
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat -> field of this API."""

_MESSAGE = re.compile(r"^messages\[(\d+)\]")
_CALL = re.compile(r"\.tool_calls\[\d+\](\.function)?")
_TOOL = re.compile(r"^(tools\[\d+\])\.function")
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResponsesRequest(GenerationRequest):
    """A request of the Responses API."""

    echoed: Mapping[str, Any] = field(default_factory=dict)  # fields that the answer repeats

    def named(self, error: ResponseError) -> FaserError:
        found = GenerationRequest.named(self, error)
        return _named(found, []) if isinstance(found, InvalidArgumentError) else found


def parse_responses(values: Values, model: ServedModel) -> ResponsesRequest:
    """Parse a body of /v1/responses; raise InvalidArgumentError."""
    fields = Fields(values)
    fields.check_names(_KNOWN, _REFUSED)
    include = fields.get("include")
    if include is not None and not (isinstance(include, list) and all(entry in _INCLUDE for entry in include)):
        raise RequestError(f"is {shown(include)}, allowed is {shown(list(_INCLUDE))}", "include")
    _check_metadata(fields.get("metadata") or {})
    messages, origins = _messages(fields)
    chat = {name: fields.get(name) for name in _SAME if name in fields} | {"messages": messages}
    chat |= {"max_completion_tokens": fields.get("max_output_tokens")}
    chat |= _response_format(fields) | _reasoning(fields) | _tools(fields)
    try:
        request = parse_chat(chat, model)
    except InvalidArgumentError as error:
        raise _named(error, origins) from error
    options = StreamOptions(include_usage=True, include_obfuscation=_obfuscation(fields))
    kept = {entry.name: getattr(request, entry.name) for entry in dataclasses.fields(request)}
    return ResponsesRequest(**{**kept, "options": options}, echoed=_echoed(fields))


def _messages(fields: Fields) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Return a chat's messages, and for each the index of its first item of `input`; None for the instructions."""
    messages: list[dict[str, Any]] = []
    origins: list[int | None] = []  # errors about a call name the first item of its message
    if (instructions := fields.text("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
        origins.append(None)
    value = fields.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise RequestError(f"is {kind_of(value)}; it must be a text or a list of at least one item", "input")
    check_count("input", len(items), MAX_MESSAGES)
    thought = ""
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            thought = _texts(f"{where}.content", item.get("content") or [], ("reasoning_text",))
            continue
        message = _message(where, kind, item)
        # Calls are separate items here, but in a chat they are part of the preceding message.
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            message = messages[-1]
        else:
            messages.append(message)
            origins.append(number)
        if message["role"] == "assistant" and thought:
            thoughts = (message.get("reasoning_content"), thought)
            message["reasoning_content"] = "\n".join(filter(None, thoughts))
        thought = ""
    return messages, origins


def _message(where: str, kind: Any, item: Values) -> dict[str, Any]:
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if isinstance(content, list):
            content = _texts(f"{where}.content", content, ("input_text", "output_text", "text"))
        return {"role": role, "content": content}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = _texts(f"{where}.output", output, ("input_text", "output_text", "text"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    allowed = "message, reasoning, function_call, function_call_output"
    raise RequestError(f"is {shown(kind)}, allowed are {allowed}", f"{where}.type")


def _texts(where: str, parts: Any, kinds: tuple[str, ...]) -> str:
    if not isinstance(parts, list) or len(parts) > MAX_CONTENT_PARTS:
        raise RequestError(f"is {kind_of(parts)}; it must be a list of at most {MAX_CONTENT_PARTS} parts", where)
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestError(f"has a part of type {shown(kind)}, allowed is {kinds[0]} with a text", where)
        found.append(part["text"])
    return "".join(found)


def _response_format(fields: Fields) -> dict[str, Any]:
    text = fields.get("text")
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise RequestError(f"is {kind_of(text)}; it must be an object", "text")
    for name, value in text.items():
        if name != "format" and (name, value) not in (("verbosity", None), ("verbosity", "medium")):
            raise RequestError(f"has {shown(name)}, only format is supported; leave it out", "text")
    described = text.get("format")
    if not isinstance(described, dict):
        return {} if described is None else {"response_format": described}
    if described.get("type") != "json_schema":
        return {"response_format": {"type": described.get("type")}}
    schema = {name: value for name, value in described.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _reasoning(fields: Fields) -> dict[str, Any]:
    reasoning = fields.get("reasoning")
    if reasoning is None:
        return {}
    if not isinstance(reasoning, dict):
        raise RequestError(f"is {kind_of(reasoning)}; it must be an object", "reasoning")
    for name, value in reasoning.items():
        # Many clients ask for a summary ("auto"); they get the whole reasoning instead.
        if name not in ("effort", "summary", "generate_summary") and value is not None:
            raise RequestError(f"has {shown(name)}, allowed are effort and summary", "reasoning")
    return {"reasoning_effort": reasoning.get("effort")}


def _tools(fields: Fields) -> dict[str, Any]:
    """Translate `tools` and `tool_choice` to those of a chat, where a function is a nested object."""
    found: dict[str, Any] = {}
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if isinstance(tools, list):
        check_count("tools", len(tools), MAX_TOOLS)
        for i, tool in enumerate(tools):
            if not isinstance(tool, dict) or tool.get("type") != "function":
                kind = tool.get("type") if isinstance(tool, dict) else tool
                raise RequestError(f"is {shown(kind)}, only function is supported", f"tools[{i}].type")
        tools = [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            for tool in tools
        ]
    if tools is not None:
        found["tools"] = tools
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None:
        found["tool_choice"] = choice
    return found


def _obfuscation(fields: Fields) -> bool | None:
    options = fields.get("stream_options")
    if options is None:
        return None
    if not isinstance(options, dict) or set(options) - {"include_obfuscation"}:
        raise RequestError("must be an object with include_obfuscation", "stream_options")
    name = "stream_options.include_obfuscation"
    flags = Fields({name: options.get("include_obfuscation")})
    return flags.flag(name) if name in flags else None


def _check_metadata(value: Any) -> None:
    """Raise InvalidArgumentError for metadata beyond OpenAI's limits, since the answer repeats it."""
    if not isinstance(value, dict):
        raise RequestError(f"is {kind_of(value)}; it must be an object of texts", "metadata")
    check_count("metadata", len(value), MAX_METADATA)
    for name, text in value.items():
        num_chars = len(name) + len(checked_text(f"metadata[{shown(name)}]", text))
        check_count("metadata", num_chars, MAX_METADATA_CHARS, "characters")


def _echoed(fields: Fields) -> dict[str, Any]:
    """Return the fields that the answer repeats, all of limited size."""
    text = fields.get("text") or {}
    reasoning = fields.get("reasoning") or {}
    defaults: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }
    found = {name: fields.get(name) if name in fields else value for name, value in defaults.items()}
    return found | {
        "text": {"format": text.get("format") or {"type": "text"}},
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "background": False,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
    }


def _named(error: InvalidArgumentError, origins: list[int | None]) -> InvalidArgumentError:
    """Return a chat's error with this API's field names. origins: see _messages()."""
    status, reason = (error.status, error.reason) if isinstance(error, RequestError) else (400, None)
    if error.field is None:
        is_prompt = isinstance(error, RequestError) and error.param == "messages"
        return RequestError(error.message, param="input", status=status, reason=reason) if is_prompt else error
    name = error.field
    if (found := _MESSAGE.match(name)) is not None:
        origin = origins[int(found[1])]
        name = ("instructions" if origin is None else f"input[{origin}]") + name[found.end() :]
        name = _CALL.sub("", name)
    name = _TOOL.sub(r"\1", name)
    for chat_s, own in _NAMES.items():
        if name == chat_s or name.startswith(f"{chat_s}."):
            name = own + name[len(chat_s) :]
            break
    name = "input" if name == "messages" else name
    # The message may also name fields of a chat.
    message = error.message.replace("max_completion_tokens", "max_output_tokens")
    param = "text.format" if name.startswith("text.format") else None
    return RequestError(message, name, value=error.value, limit=error.limit, param=param, status=status, reason=reason)
