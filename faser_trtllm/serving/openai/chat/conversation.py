"""A chat request as the model sees it: the prompt, the grammar of its answer, and how the answer is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faser_trtllm.serving.openai.chat.answer import Parsing
from faser_trtllm.serving.openai.chat.call_grammar import CallGrammar, Thinking, envelope_of
from faser_trtllm.serving.openai.chat.message import read_messages
from faser_trtllm.serving.openai.chat.template_args import template_args
from faser_trtllm.serving.openai.chat.tools import Tools, read_tools
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields
from faser_trtllm.serving.openai.guide import checked_guide, guide_inputs
from faser_trtllm.serving.openai.served_model import ServedModel, naming_length
from faser_trtllm.serving.parsers.registry import reasoning_marks

_MAX_MARK_TOKENS = 32  # at the prompt's end


@dataclass(frozen=True, slots=True)
class Conversation:
    """parsing: None: the answer is its text. guide_field: the field that constrains the answer, None: none does.
    inputs: of the Triton model. turn_end: the token after an answer, where texts do not end at it anyway.
    """

    prompt: tuple[int, ...]
    parsing: Parsing | None
    guide_field: str | None
    inputs: Mapping[str, Any]
    turn_end: str | None = None


def read_conversation(fields: Fields, model: ServedModel) -> Conversation:
    """Raises InvalidArgumentError. May take long for long messages."""
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
            f"was sent, but the chat template of {model.name} does not tell how it calls functions; start the server "
            "with --tool_call_parser, or leave tools out",
            "tools",
        )
    with naming_length("messages"):
        model.check_size(sum(len(message["content"]) + len(message.get("name", "")) for message in messages))
        definitions = None if tools is None else tools.definitions
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
        thinking = None  # it is followed from the first token
    parsing = _parsing(model, tools, thinking, shows_reasoning)
    shows_special = _has_special_marks(model, tools, thinking)
    inputs = guide | ({"skip_special_tokens": False} if shows_special else {})
    return Conversation(prompt, parsing, guide_field, inputs, _turn_end(model))


def _turn_end(model: ServedModel) -> str | None:
    assert model.tokenizer is not None, "it has a chat template"
    assert model.chat_template is not None, "it is asked for"
    token = model.chat_template.turn_end
    return None if token is None or model.tokenizer.token_id(token) in model.tokenizer.eos_token_ids else token


def _thinking(model: ServedModel, prompt: Sequence[int]) -> Thinking | None:
    """How the answer to a prompt thinks, None: it does not, since the model cannot or the template forbids it."""
    if model.reasoning_parser is None:
        return None
    assert model.tokenizer is not None, "it has a chat template"
    start, end = reasoning_marks(model.reasoning_parser)
    tail = model.tokenizer.decode(prompt[-_MAX_MARK_TOKENS:], skip_special_tokens=False).rstrip()
    return None if tail.endswith(end) else Thinking(start, end, tail.endswith(start))


def _grammar(
    model: ServedModel, tools: Tools | None, thinking: Thinking | None, field: str | None, guide: Mapping[str, str]
) -> str | None:
    """The grammar of an answer that has more to follow than its guide, None: there is no more."""
    content = _schema(guide)
    assert model.tokenizer is not None, "it has a chat template"
    grammar = CallGrammar(model.tokenizer)
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
    """Texts have to show special tokens, since the parsers look for such."""
    assert model.tokenizer is not None, "it has a chat template"
    marks: tuple[str, ...] = () if thinking is None else (thinking.start, thinking.end)
    if tools is not None:
        envelope = envelope_of(model.tool_parser or "", model.tokenizer)
        if envelope is None:
            return True
        marks += envelope.marks
    return any(map(model.tokenizer.is_special, marks))


def _schema(guide: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The JSON schema of a guide, None if it has another type or is none."""
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
        tool_parser=None if tools is None else model.tool_parser,
        reasoning_parser=None if thinking is None else model.reasoning_parser,
        tools=() if tools is None else tools.definitions,
        starts_in_reasoning=thinking is not None and thinking.has_started,
        is_parallel=tools is None or tools.is_parallel,
        shows_reasoning=shows_reasoning,
        is_named=tools is not None and tools.named is not None,
    )
