"""Grammars of answers with calls, as each model family writes them, with the schemas of their arguments.

Grammars are in llguidance's Lark syntax. A mark that is a token of the model may be this token or spelled out, since
parsers read text. Text is free up to the mark that begins a call; from there on it must follow the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.guided.grammar import WHITE_SPACE
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.chat.tagged_arguments import LOOSE, tagged_arguments
from faser_trtllm.serving.openai.chat.tools import Function, Tools
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.parsers.registry import HARMONY_CALLS

_OPTIONS = """%llguidance {}
"""
_NO_FORCING = """%llguidance {"no_forcing": true}
"""
_BASE = r"""TEXT: /(.|\n)*/
gap: /[ \t\r\n]{1,8}/
"""
_NOTES = frozenset(("description", "title", "examples", "default", "deprecated", "$comment"))
_VALUES = frozenset(("enum", "const", "x-guidance"))
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


@dataclass(frozen=True, slots=True)
class Envelope:
    """How a family writes calls: `first` call `separator` call ... `last`.

    A call is `before`, the name, `between`, the arguments, `after`.
    """

    before: str
    between: str
    after: str
    begin: str  # begins the first call if text may come before it
    separator: str = "\n"
    first: str = ""
    last: str = ""
    may_open: bool = False  # an answer that opens with a brace is a call, even without `begin`
    is_tagged: bool = False  # arguments are tags instead of JSON
    other_marks: tuple[str, ...] = ()  # further strings that may be tokens of their own

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, *self.other_marks)


def _deepseek(between: str, after: str, separator: str, kind: str = "") -> Envelope:
    names = ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
    begin, last, call, call_end, name = (f"<\uff5ctool\u2581{name}\uff5c>" for name in names)
    marks = (last, call, call_end, name)
    before = f"{call}{kind}{name}" if kind else call
    return Envelope(before, between or name, f"{after}{call_end}", begin, separator, begin, last, other_marks=marks)


_HERMES = Envelope(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", other_marks=("</tool_call>",)
)
_LLAMA = Envelope('{"name": "', '", "parameters": ', "}", "<|python_tag|>", "; ", may_open=True)
_MISTRAL = Envelope('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS]", ", ", "[TOOL_CALLS][", "]")
_MISTRAL_ARGS = Envelope("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", "", other_marks=("[ARGS]",))
_QWEN3_CODER = Envelope(
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    "<tool_call>",
    is_tagged=True,
    other_marks=("</tool_call>",),
)
_HARMONY = Envelope(
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    "<|channel|>",
    other_marks=("<|constrain|>", "<|message|>"),
)
_ENVELOPES = {
    "deepseek_v3": _deepseek("\n```json\n", "\n```", "\n", "function"),
    "deepseek_v31": _deepseek("", "", ""),
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": _MISTRAL,
    HARMONY_CALLS: _HARMONY,
    "qwen3_coder": _QWEN3_CODER,
}


def envelope_of(tool_parser: str, tokenizer: Tokenizer) -> Envelope | None:
    """Return how the models of a parser write calls, or None if no grammar is known."""
    if tool_parser == "mistral" and tokenizer.token_id("[ARGS]") is not None:
        return _MISTRAL_ARGS
    return _ENVELOPES.get(tool_parser)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around an answer's reasoning."""

    start: str
    end: str
    has_started: bool  # the prompt ends within the reasoning; otherwise the answer may have none


class CallGrammar:
    """Writes grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of_calls(
        self, tools: Tools, envelope: Envelope, thinking: Thinking | None, content: Mapping[str, Any] | None = None
    ) -> str:
        """Return the grammar of answers that must or may call functions.

        content: the JSON schema of an answer without calls; only for families whose calls begin with a mark.
        """
        call = f"call: {self._text(envelope.before, envelope)} function {self._text(envelope.after, envelope)}\n"
        schemas = [_arguments(function, tools.is_forced) for function in tools.callable]
        rules = self._base(*schemas, content) + call + self._functions(tools, envelope) + self._thinking(thinking)
        more = f"({self._text(envelope.separator, envelope)} call)*" if tools.is_parallel else ""
        first, last = self._text(envelope.first, envelope), self._text(envelope.last, envelope)
        rules += f"calls: {first} call {more} {last}\n"
        think = _think(thinking)
        if tools.is_forced:
            return f"{rules}start: {think} calls\n"
        if content is not None:
            return f"{rules}start: {think} (calls | content)\ncontent: {_json(content)}\n"
        if envelope.may_open:
            return f"{rules}{self._opening(envelope, thinking)}"
        begun = self._text((envelope.first + envelope.before).removeprefix(envelope.begin), envelope)
        rest = f"{begun} function {self._text(envelope.after, envelope)}"
        if envelope.first:
            rest += f" {more} {last}"
        rules += self._up_to("lead", envelope.begin)
        if not envelope.is_tagged:
            return f"{rules}start: {think} (lead {rest})* TEXT\n"
        rules += self._up_to("bare", "<function=")  # also begins a call
        return f'{rules}start: {think} (lead {rest} | bare function "</function>")* TEXT\n'

    def of_content(self, content: Mapping[str, Any], thinking: Thinking) -> str:
        """Return the grammar of answers that, after their reasoning, are JSON of a schema."""
        rules = self._base(content) + self._thinking(thinking)
        return f"{rules}start: {_think(thinking)} content\ncontent: {_json(content)}\n"

    def _base(self, *schemas: Mapping[str, Any] | None) -> str:
        """Return the beginning of a grammar, without forced text if schemas contain added tokens.

        The library tokenizes text that must follow, and then refuses tokens that are not text, such as "<|eot|>" in a
        string.
        """
        has_added = any(self._tokenizer.has_added_token(json.dumps(one, ensure_ascii=False)) for one in schemas)
        return (_NO_FORCING if has_added else _OPTIONS) + _BASE

    def _opening(self, envelope: Envelope, thinking: Thinking | None) -> str:
        """Return rules of answers whose first character decides between calls, reasoning and other text."""
        space, begin = r"[ \t\r\n]*", "" if thinking is None or thinking.has_started else thinking.start[0]
        rules = rf"OTHER: /({space}[^{{ \t\r\n](.|\n)*|{space})/" + "\n"
        rules += rf"PLAIN: /({space}[^{{{re.escape(begin)} \t\r\n](.|\n)*|{space})/" + "\n"
        rules += self._up_to("later", envelope.begin, "OTHER") + self._up_to("sooner", envelope.begin, "PLAIN")
        after = "(calls | later calls | OTHER)"
        if thinking is None or thinking.has_started:
            return f"{rules}start: {_think(thinking)} {after}\n"
        return f"{rules}start: think {after} | calls | sooner calls | PLAIN\n"

    def _functions(self, tools: Tools, envelope: Envelope) -> str:
        rules = []
        for i, function in enumerate(tools.callable):
            head = self._text(function.name + envelope.between, envelope)
            schema = _arguments(function, tools.is_forced)
            if not envelope.is_tagged:
                rules.append(f"function_{i}: {head} {_json(schema)}\n")
                continue
            is_loose = not (tools.is_forced or function.is_strict)
            found, wrong = (LOOSE, None) if is_loose else tagged_arguments(f"arguments_{i}", schema, _json)
            if wrong is not None:
                raise RequestError(
                    f"has {wrong} of {function.name}, whose schema cannot be enforced because the model writes "
                    "arguments in tags; simplify it, or send tool_choice auto without strict",
                    "tools",
                )
            rules += [] if found in rules else [found]
            rules.append(f"function_{i}: {head} {'loose' if is_loose else f'arguments_{i}'}\n")
        names = " | ".join(f"function_{i}" for i in range(len(tools.callable)))
        return f"function: {names}\n{''.join(rules)}"

    def _thinking(self, thinking: Thinking | None) -> str:
        if thinking is None:
            return ""
        rules = self._up_to("thought", thinking.end)
        if thinking.has_started:
            return f"{rules}think: thought gap?\n"
        if self._tokenizer.token_id(thinking.start) is None:
            return (
                f"{rules}think: spelled gap?\nspelled[lazy]: {_quoted(thinking.start)} TEXT {_quoted(thinking.end)}\n"
            )
        return f"{rules}think: {self._mark(thinking.start)} thought gap?\n"

    def _up_to(self, name: str, mark: str, text: str = "TEXT") -> str:
        """Return a rule for text up to and including a mark."""
        token = self._tokenizer.token_id(mark)
        as_token = "" if token is None else f"{text} <[{token}]> | "
        return f"{name}: {as_token}{name}_spelled\n{name}_spelled[lazy]: {text} {_quoted(mark)}\n"

    def _text(self, text: str, envelope: Envelope) -> str:
        """Return a rule's part for a text in which marks may be tokens."""
        marks = "|".join(map(re.escape, envelope.marks))
        pieces = re.split(f"({marks})", text) if marks else [text]
        return " ".join(self._mark(piece) if i % 2 else _quoted(piece) for i, piece in enumerate(pieces) if piece)

    def _mark(self, text: str) -> str:
        token = self._tokenizer.token_id(text)
        return _quoted(text) if token is None else f"(<[{token}]> | {_quoted(text)})"


class HarmonyGrammar(CallGrammar):
    """Writes grammars of gpt-oss's answers: reasoning and preambles, then one call or the final message."""

    def of_calls(
        self, tools: Tools, envelope: Envelope, thinking: Thinking | None, content: Mapping[str, Any] | None = None
    ) -> str:
        schemas = [_arguments(function, tools.is_forced) for function in tools.callable]
        rules = self._base(*schemas, content) + self._functions(tools, envelope)
        rules += f"call: {self._text(envelope.before, envelope)} function\n"
        return rules + self._messages("call" if tools.is_forced else "(call | final)", thinking, content)

    def of_content(self, content: Mapping[str, Any], thinking: Thinking) -> str:
        return self._base(content) + self._messages("final", thinking, content)

    def _messages(self, last: str, thinking: Thinking | None, content: Mapping[str, Any] | None) -> str:
        channel, message, start = (self._mark(f"<|{name}|>") for name in ("channel", "message", "start"))
        rules = self._up_to("body", "<|end|>") + f'rest: body {start} "assistant"\n'
        rules += f'said: {channel} ("analysis" | "commentary") {message} rest\n'
        rules += f'final: {channel} "final" {message} {"TEXT" if content is None else _json(content)}\n'
        begun = "rest" if thinking is not None and thinking.has_started else ""
        return f"{rules}start: {begun} said* {last}\n"


def _think(thinking: Thinking | None) -> str:
    if thinking is None:
        return ""
    return "think" if thinking.has_started else "think?"


def _arguments(function: Function, is_forced: bool) -> Mapping[str, Any]:
    """Return the schema that the arguments must follow."""
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", **function.parameters} if is_forced or function.is_strict else {"type": "object"}


def _json(schema: Mapping[str, Any]) -> str:
    """Return a rule's part for JSON of a schema."""
    whole = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **_bare(schema)}
    return f"%json {json.dumps(whole, separators=(',', ':'))}"


def _bare(schema: Any) -> Any:
    """Return a schema without descriptions and the like, which are often its longest part and do not constrain it."""
    if isinstance(schema, list):
        return [_bare(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            found[name] = {key: _bare(entry) for key, entry in value.items()}
        elif name not in _NOTES:
            found[name] = value if name in _VALUES else _bare(value)
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
