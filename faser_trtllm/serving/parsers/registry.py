"""Finds parsers by vLLM's names for them, or by a model's chat template.

No library does this. partial-json-parser completes truncated JSON for another parser; it reads the whole text again for
each piece, and returns values instead of the model's characters. openai-harmony only reads the token ids of gpt-oss's
format, which no parser here supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.parsers.parser import Parser
from faser_trtllm.serving.parsers.tool_parser import (
    ToolParser,
    deepseek_v3,
    hermes,
    llama3_json,
    mistral,
    qwen3_coder,
)

_TOOL_PARSERS: dict[str, ToolParser] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v3,
    "hermes": hermes,
    "llama3_json": llama3_json,
    "llama4_json": llama3_json,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
}
_THINK = ("<think>", "</think>")
_REASONING_MARKS = {"deepseek_r1": _THINK, "mistral": ("[THINK]", "[/THINK]"), "qwen3": _THINK}


def parser_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parsers for calls and for reasoning."""
    return tuple(_TOOL_PARSERS), tuple(_REASONING_MARKS)


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """Return the names of the parsers for calls and for reasoning that fit a chat template, or None."""
    return _tool_parser(chat_template), _reasoning_parser(chat_template)


def _tool_parser(template: str) -> str | None:
    if "<\uff5ctool\u2581calls\u2581begin\uff5c>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3_coder"
        return "hermes" if "arguments" in template and "<arg_key>" not in template else None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if '"parameters"' in template and '"name"' in template and "<|start_header_id|>" in template:
        return "llama3_json"
    return None


def _reasoning_parser(template: str) -> str | None:
    if "[THINK]" in template:
        return "mistral"
    if "<think>" in template or "</think>" in template:
        return "deepseek_r1" if "<\uff5cAssistant\uff5c>" in template else "qwen3"
    return None


def reasoning_marks(reasoning_parser: str) -> tuple[str, str]:
    """Return the texts around the reasoning. They are added tokens of the models, in some models special tokens."""
    if reasoning_parser not in _REASONING_MARKS:
        raise InvalidArgumentError(
            f"is {reasoning_parser}, allowed are {', '.join(_REASONING_MARKS)}", "reasoning_parser"
        )
    return _REASONING_MARKS[reasoning_parser]


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Mapping[str, Any]],
    starts_in_reasoning: bool,
) -> Parser:
    """Return a parser for one answer; raise InvalidArgumentError for unknown names.

    tools: OpenAI's definitions of the functions; calls of other functions are content. starts_in_reasoning: the prompt
    ends within the reasoning. The text must contain the marks of both parsers, even those that are special tokens.
    """
    if tool_parser is not None and tool_parser not in _TOOL_PARSERS:
        raise InvalidArgumentError(f"is {tool_parser}, allowed are {', '.join(_TOOL_PARSERS)}", "tool_parser")
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    read_calls = None if tool_parser is None else _TOOL_PARSERS[tool_parser]
    thinking = None if reasoning_parser is None else reasoning_marks(reasoning_parser)
    return Parser(read_calls, functions, thinking, starts_in_reasoning and thinking is not None)
