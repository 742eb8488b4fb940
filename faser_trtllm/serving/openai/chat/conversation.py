"""Converts a chat request to a prompt, the grammar of its answer, and a way to parse the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faser_trtllm.serving.openai.chat.answer import Parsing
from faser_trtllm.serving.openai.chat.call_grammar import CallGrammar, HarmonyGrammar, Thinking, envelope_of
from faser_trtllm.serving.openai.chat.message import read_messages
from faser_trtllm.serving.openai.chat.template_args import template_args
from faser_trtllm.serving.openai.chat.tools import Tools, read_tools
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields
from faser_trtllm.serving.openai.guide import checked_guide, guide_inputs
from faser_trtllm.serving.openai.served_model import ServedModel, naming_length
from faser_trtllm.serving.parsers.registry import HARMONY_REASONING, reasoning_marks

_MAX_MARK_TOKENS = 32  # tokens at the prompt's end that are searched for a mark


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat request as the model gets it."""

    prompt: tuple[int, ...]
    parsing: Parsing | None  # None: the answer is plain text
    guide_field: str | None  # the field that constrains the answer
    inputs: Mapping[str, Any]  # the Triton model's
    turn_end: str | None = None  # the token after an answer, unless it is an end token anyway


def read_conversation(fields: Fields, model: ServedModel) -> Conversation:
    """Read a chat request; raise InvalidArgumentError. This can take long for long messages."""
    tools = read_tools(fields)
    messages = read_messages(fields.get("messages"))
    args = template_args(fields)
    shows_reasoning = "include_reasoning" not in fields or fields.flag("include_reasoning")
    guide_field, guide = guide_inputs(fields)
    template = model.chat_template
    if template is None:
        raise RequestError(
            f"model {model.name} has no chat template; start the server with --engine_dir and --chat_template, or use "
            "/v1/completions",
            param="messages",
        )
    if tools is not None and model.tool_parser is None:
        raise RequestError(
            f"was sent, but the chat template of {model.name} does not show how it calls functions; start the server "
            "with --tool_call_parser, or leave tools out",
            "tools",
        )
    with naming_length("messages"):
        model.check_size(sum(len(message["content"]) + len(message.get("name", "")) for message in messages))
        definitions = None if tools is None else _definitions(tools, model)
        prompt = tuple(template.encode(messages, model.check_length, definitions, args))
        model.check_length(prompt)
    if not prompt:
        raise RequestError("render to an empty prompt; send a message with content", "messages")
    thinking = _thinking(model, prompt)
    grammar = _grammar(model, tools, thinking, guide_field, guide)
    if grammar is not None:
        guide_field = guide_field if tools is None or not tools.is_guided else "tools"
        guide = checked_guide(guide_field or "tools", "ebnf_grammar", grammar)
    elif guide:
        thinking = None  # the guide applies from the first token
    parsing = _parsing(model, tools, thinking, shows_reasoning)
    shows_special = _has_special_marks(model, tools, thinking)
    inputs = guide | ({"skip_special_tokens": False} if shows_special else {})
    return Conversation(prompt, parsing, guide_field, inputs, _turn_end(model))


def _definitions(tools: Tools, model: ServedModel) -> Sequence[Mapping[str, Any]]:
    """Return the functions for the template; gpt-oss's template fails for those without a description."""
    if not model.is_harmony:
        return tools.definitions
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools.definitions]


def _turn_end(model: ServedModel) -> str | None:
    assert model.tokenizer is not None, "it has a chat template"
    assert model.chat_template is not None, "it is asked for"
    if model.is_harmony:
        return None  # "<|end|>" ends a message, and others may follow in the turn
    token = model.chat_template.turn_end
    return None if token is None or model.tokenizer.token_id(token) in model.tokenizer.eos_token_ids else token


def _thinking(model: ServedModel, prompt: Sequence[int]) -> Thinking | None:
    """Return the marks of the answer's reasoning, or None if the model does not reason or the template prevents it."""
    parser = HARMONY_REASONING if model.is_harmony else model.reasoning_parser
    if parser is None:
        return None
    assert model.tokenizer is not None, "it has a chat template"
    start, end = reasoning_marks(parser)
    tail = model.tokenizer.decode(prompt[-_MAX_MARK_TOKENS:], skip_special_tokens=False).rstrip()
    has_started = tail.endswith(start)
    is_answer = tail.endswith("<|message|>" if model.is_harmony else end)
    return Thinking(start, end, has_started) if has_started or not is_answer else None


def _grammar(
    model: ServedModel, tools: Tools | None, thinking: Thinking | None, field: str | None, guide: Mapping[str, str]
) -> str | None:
    """Return the grammar of an answer that is constrained by more than its guide, or None."""
    content = _schema(guide)
    assert model.tokenizer is not None, "it has a chat template"
    grammar = (HarmonyGrammar if model.is_harmony else CallGrammar)(model.tokenizer)
    if tools is None or not (guide or tools.is_guided):
        return None if thinking is None or content is None else grammar.of_content(content, thinking)
    if guide and content is None:
        raise RequestError(f"and {field} were sent; send one of them", "tools")
    envelope = envelope_of(model.tool_parser or "", model.tokenizer)
    if envelope is None:
        what = f"is {tools.choice}" if tools.is_forced else f"is sent with strict functions or {field}"
        raise RequestError(
            f"{what}, which the parser {model.tool_parser} cannot enforce; send auto without them", "tool_choice"
        )
    if content is not None and envelope.may_open and not tools.is_forced:
        raise RequestError(f"and {field} were sent, both of which begin with a brace; send one of them", "tools")
    return grammar.of_calls(tools, envelope, thinking, content)


def _has_special_marks(model: ServedModel, tools: Tools | None, thinking: Thinking | None) -> bool:
    """Return True if the text must include special tokens, since parsers search for them."""
    assert model.tokenizer is not None, "it has a chat template"
    marks: tuple[str, ...] = () if thinking is None else (thinking.start, thinking.end)
    if tools is not None:
        envelope = envelope_of(model.tool_parser or "", model.tokenizer)
        if envelope is None:
            return True
        marks += envelope.marks
    return any(map(model.tokenizer.is_special, marks))


def _schema(guide: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the JSON schema of a guide, or None if the guide is not a JSON schema."""
    if guide.get("guided_decoding_guide_type") != "json_schema":
        return None
    try:
        schema = json.loads(guide["guided_decoding_guide"])
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def _parsing(
    model: ServedModel, tools: Tools | None, thinking: Thinking | None, shows_reasoning: bool
) -> Parsing | None:
    if tools is None and thinking is None:
        return None
    return Parsing(
        tool_parser=None if tools is None and not model.is_harmony else model.tool_parser,
        reasoning_parser=None if thinking is None else model.reasoning_parser,
        tools=() if tools is None else tools.definitions,
        starts_in_reasoning=thinking is not None and thinking.has_started,
        is_parallel=tools is None or tools.is_parallel,
        shows_reasoning=shows_reasoning,
        is_named=tools is not None and tools.named is not None,
    )
