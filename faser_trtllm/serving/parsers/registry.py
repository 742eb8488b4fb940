"""Finds parsers by vLLM's names for them, or by a model's chat template.

No library does this. partial-json-parser completes truncated JSON for another parser; it reads the whole text again for
each piece, and returns values instead of the model's characters. openai-harmony reads the token ids of gpt-oss's
format, but stop words end texts within tokens, and it raises errors for malformed messages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.parsers.harmony import harmony
from faser_trtllm.serving.parsers.parser import Parser
from faser_trtllm.serving.parsers.tool_parser import (
    ToolParser,
    deepseek_v3,
    hermes,
    llama3_json,
    mistral,
    qwen3_coder,
)

HARMONY_CALLS, HARMONY_REASONING = "openai", "openai_gptoss"
_TOOL_PARSERS: dict[str, ToolParser | None] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v3,
    "hermes": hermes,
    "llama3_json": llama3_json,
    "llama4_json": llama3_json,
    "mistral": mistral,
    HARMONY_CALLS: None,  # one parser reads calls and reasoning
    "qwen3_coder": qwen3_coder,
}
_THINK = ("<think>", "</think>")
_REASONING_MARKS = {
    "deepseek_r1": _THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    HARMONY_REASONING: ("<|channel|>analysis<|message|>", "<|end|>"),
    "qwen3": _THINK,
}


def parser_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parsers for calls and for reasoning."""
    return tuple(_TOOL_PARSERS), tuple(_REASONING_MARKS)


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """Return the names of the parsers for calls and for reasoning that fit a chat template, or None."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return HARMONY_CALLS, HARMONY_REASONING
    return _tool_parser(chat_template), _reasoning_parser(chat_template)


def is_harmony(tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Return True if the parsers read harmony, whose text has marks in every answer.

    Raises InvalidArgumentError if only one of them does.
    """
    if tool_parser != HARMONY_CALLS and reasoning_parser != HARMONY_REASONING:
        return False
    if tool_parser not in (None, HARMONY_CALLS) or reasoning_parser not in (None, HARMONY_REASONING):
        raise InvalidArgumentError(
            f"is {reasoning_parser} with the tool_call_parser {tool_parser}, but {HARMONY_CALLS} and "
            f"{HARMONY_REASONING} read another format than other parsers; set both, or one of them and none",
            "reasoning_parser",
        )
    return True


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
    thinking = None if reasoning_parser is None else reasoning_marks(reasoning_parser)
    if is_harmony(tool_parser, reasoning_parser):
        read = functools.partial(harmony, shows_reasoning=thinking is not None, starts_in_reasoning=starts_in_reasoning)
        return Parser(read, functions if tool_parser else {}, None, False)
    read_calls = None if tool_parser is None else _TOOL_PARSERS[tool_parser]
    return Parser(read_calls, functions, thinking, starts_in_reasoning and thinking is not None)
