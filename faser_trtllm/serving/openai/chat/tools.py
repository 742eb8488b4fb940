"""Reads the functions that a model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.core.sampling_params import check_count
from faser_trtllm.serving.openai.chat.json_value import check_json
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 << 10
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None  # JSON schema of the arguments' object; None: no arguments
    is_strict: bool  # arguments must follow the schema in every call


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of a request, and how the model may use them."""

    definitions: tuple[Mapping[str, Any], ...]  # for the chat template
    functions: tuple[Function, ...]
    choice: str  # auto or required
    named: str | None  # the one function that must be called; None: any
    is_parallel: bool  # an answer may have several calls

    @property
    def callable(self) -> tuple[Function, ...]:
        return tuple(function for function in self.functions if self.named in (None, function.name))

    @property
    def is_forced(self) -> bool:
        return self.choice == "required"

    @property
    def is_guided(self) -> bool:
        """True if the output must follow a grammar."""
        return self.is_forced or any(function.is_strict for function in self.functions)


def read_tools(fields: Fields) -> Tools | None:
    """Read the fields `tools`, `tool_choice` and `parallel_tool_calls`; None if the model may not call functions.

    Raises InvalidArgumentError.
    """
    value, choice = fields.get("tools"), fields.get("tool_choice")
    is_parallel = "parallel_tool_calls" not in fields or fields.flag("parallel_tool_calls")
    if value is not None and not isinstance(value, list):
        raise RequestError(f"is {kind_of(value)}; it must be a list", "tools")
    check_count("tools", len(value or ()), MAX_TOOLS)
    check_count("tools", check_json("tools", value or []), MAX_TOOLS_CHARS, "characters")
    definitions = [_definition(f"tools[{i}]", tool) for i, tool in enumerate(value or ())]
    functions = [_function(f"tools[{i}].function", tool["function"]) for i, tool in enumerate(definitions)]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"has {names.count(name)} functions {name}; give each a name of its own", "tools")
    named = None if choice is None or choice in _CHOICES else _named(choice, names)
    if choice == "required" and not functions:
        raise RequestError("is required without tools; send tools or leave it out", "tool_choice")
    if not functions or choice == "none":
        return None
    shown_ones = tuple({"type": "function", "function": _without_strict(tool["function"])} for tool in definitions)
    mode = "required" if named is not None or choice == "required" else "auto"
    return Tools(shown_ones, tuple(functions), mode, named, is_parallel and named is None)


def checked_name(where: str, value: Any) -> str:
    """Return the name of a function; raise RequestError."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise RequestError(f"is {shown(value)}, allowed are 1 to 64 letters, digits, _ and -", where)
    return value


def _definition(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("function"), dict):
        kind = value.get("type") if isinstance(value, dict) else value
        raise RequestError(f"is of type {shown(kind)}; it must be of type function with a function", where)
    return value


def _function(where: str, value: Mapping[str, Any]) -> Function:
    fields = Fields({f"{where}.{name}": entry for name, entry in value.items()})
    name = checked_name(f"{where}.name", value.get("name"))
    parameters = value.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"is {kind_of(parameters)}; it must be a JSON schema, an object", f"{where}.parameters")
    if "description" in value and value["description"] is not None:
        checked_text(f"{where}.description", value["description"])
    return Function(name, parameters, fields.flag(f"{where}.strict"))


def _without_strict(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in function.items() if name != "strict" and entry is not None}


def _named(choice: Any, names: list[str]) -> str:
    """Return the function that a tool_choice names; raise RequestError."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        allowed = f'{", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
        raise RequestError(f"is {shown(choice)}, allowed are {allowed}", "tool_choice")
    if name not in names:
        raise RequestError(f"names {shown(name)}, which is not one of the tools; send its definition", "tool_choice")
    return name
