"""Results of a model's output parser, in one form however the text is cut; and texts of all families."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from faser_trtllm.serving.parsers.event import ContentDelta, Event, ReasoningDelta, ToolCallStart
from faser_trtllm.serving.parsers.registry import make_parser, parser_names

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]
FAMILIES, REASONING = parser_names()


@dataclass(frozen=True)
class Parsed:
    """calls: (name, id, text of the arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str | None, str], ...] = ()

    def is_begun_by(self, other: Parsed) -> bool:
        """Return whether `other` may become this one without taking anything back."""
        if not (self.content.startswith(other.content) and self.reasoning.startswith(other.reasoning)):
            return False
        if not other.calls:
            return True
        *whole, (name, call_id, text) = other.calls
        same = self.calls[: len(other.calls)]
        return (
            len(same) == len(other.calls)
            and list(same[:-1]) == whole
            and same[-1][:2] == (name, call_id)
            and same[-1][2].startswith(text)
        )


def parsed(events: Iterable[Event]) -> Parsed:
    """Events in one form. Arguments have to be those of the call that began last."""
    content, reasoning = "", ""
    calls: list[tuple[str, str | None, str]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.name, event.call_id, ""))
        else:
            assert event.index == len(calls) - 1
            name, call_id, text = calls[-1]
            calls[-1] = (name, call_id, text + event.text)
    return Parsed(content, reasoning, tuple(calls))


@dataclass(frozen=True)
class Reading:
    """A kind of parser."""

    tool_parser: str | None
    reasoning_parser: str | None = None
    starts_in_reasoning: bool = False
    tools: Sequence[Any] = tuple(TOOLS)

    def open(self) -> Any:
        return make_parser(
            self.tool_parser,
            self.reasoning_parser,
            tools=self.tools,
            starts_in_reasoning=self.starts_in_reasoning,
        )

    def events(self, pieces: Iterable[str]) -> list[Event]:
        parser = self.open()
        found = [event for piece in pieces for event in parser.feed(piece)]
        return found + list(parser.finish())

    def parse(self, *pieces: str) -> Parsed:
        return parsed(self.events(pieces))


# Each family's way of writing calls of (name, text of the arguments' object).
Calls = Sequence[tuple[str, str]]


def _object(arguments: str = "arguments") -> Callable[[tuple[str, str]], str]:
    return lambda call: f'{{"name": "{call[0]}", "{arguments}": {call[1]}}}'


def _tagged(calls: Calls) -> str:
    found = ""
    for name, text in calls:
        found += f"\n<tool_call>\n<function={name}>\n"
        for key, value in json.loads(text).items():
            bare = value if isinstance(value, str) else json.dumps(value)
            found += f"<parameter={key}>\n{bare}\n</parameter>\n"
        found += "</function>\n</tool_call>"
    return found


def deepseek(name: str) -> str:
    return f"<\uff5ctool\u2581{name.replace('_', chr(0x2581))}\uff5c>"


def _deepseek(before: str, between: str, after: str, separator: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        body = separator.join(
            deepseek("call_begin") + before + name + between + text + after + deepseek("call_end")
            for name, text in calls
        )
        return deepseek("calls_begin") + body + deepseek("calls_end")

    return write


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", lambda calls: "".join(f"\n<tool_call>\n{_object()(one)}\n</tool_call>" for one in calls)),
    "hermes, arguments first": (
        "hermes",
        lambda calls: "".join(
            f'<tool_call>{{"arguments": {text}, "name": "{name}"}}</tool_call>\n' for name, text in calls
        ),
    ),
    "llama3_json": ("llama3_json", lambda calls: "<|python_tag|>" + "; ".join(map(_object("parameters"), calls))),
    "llama4_json": ("llama4_json", lambda calls: "<|python_tag|>" + "\n".join(map(_object("parameters"), calls))),
    "mistral": ("mistral", lambda calls: f"[TOOL_CALLS] [{', '.join(map(_object(), calls))}]"),
    "mistral, [ARGS]": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)),
    "mistral, bare": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{name}{text}" for name, text in calls)),
    "deepseek_v3": (
        "deepseek_v3",
        _deepseek(f"function{deepseek('sep')}", "\n```json\n", "\n```", "\n"),
    ),
    "deepseek_v31": ("deepseek_v31", _deepseek("", deepseek("sep"), "", "")),
    "openai": (
        "openai",
        lambda calls: (
            "<|end|>".join(
                f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}"
                for name, text in calls
            )
            + "<|call|>"
        ),
    ),
    "openai, recipient first": (
        "openai",
        lambda calls: "".join(
            f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{text}<|call|>"
            for name, text in calls
        ),
    ),
    "qwen3_coder": ("qwen3_coder", _tagged),
}

_COMMON = ["{", "}", "[", "]", '"', "\\", '\\"', ",", ":", "; ", " ", "\n", "\t", "a", "naïve 😀", "<", "</", ">"]
_COMMON += ["\\u00", "\\ud83d", "<think>", "</think>", "[THINK]", "[/THINK]", '{"b": "}"}', '"id": "x1"']
_COMMON += ['"name": "f"', '"parameters": {}', '"type": "function"', '"arguments": 5']
_COMMON += ['{"name": "f", "arguments": {"a": 1}}', '{"name": "nobody", "arguments": {}}']
_DEEPSEEK = [deepseek(name) for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")]
_DEEPSEEK += ["function", "f\n```json\n", "```", "f"]
_XML = ["<tool_call>", "</tool_call>", "<function=f>", "<function=nobody>", "</function>", "<parameter=a>", "5"]
_XML += ["<parameter=b>", "</parameter>", "<parameter=", "<function="]
_HARMONY = ["<|start|>assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.f", " to=python"]
_HARMONY += ["<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>user", '{"a": 1}']
_HARMONY += ["<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant<|channel|>final<|message|>", "<|end|> \n"]
_OWN = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "llama4_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", "get_time{}"],
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "openai": _HARMONY,
    "qwen3_coder": _XML,
}


def reasoning_parsers(family: str) -> tuple[str | None, ...]:
    """Parsers of reasoning that go with a family's calls."""
    return (None, *(name for name in REASONING if (name == "openai_gptoss") == (family == "openai")))


def random_text(family: str, rng: random.Random) -> str:
    """Pieces of the family's format in any order, or calls with a fault."""
    if rng.random() < 0.5:
        return "".join(rng.choice(rng.choice((_COMMON, _OWN[family]))) for _ in range(rng.randrange(1, 25)))
    write = rng.choice([write for name, write in WRITERS.values() if name == family])
    calls = [(rng.choice(("f", "get_time", "nobody")), rng.choice(ARGUMENTS)) for _ in range(rng.randrange(1, 4))]
    text = rng.choice(("", "Let me look. ", "<think>\nhm\n</think>\n\n")) + write(calls) + rng.choice(("", "\n", " ok"))
    place = rng.randrange(len(text) + 1)
    fault = rng.randrange(5)
    if fault == 0:
        return text[:place]
    if fault == 1:
        return text[:place] + text[place + 1 :]
    if fault == 2:
        return text[:place] + rng.choice(_COMMON + _OWN[family]) + text[place:]
    return text


ARGUMENTS = (
    "{}",
    '{"a": 1}',
    '{"a":  -2,\n "b": "x"}',
    '{"b": "} ] { [ , :"}',
    '{"b": "\\" \\\\ \\u00e9 \\ud83d\\ude00 \\n"}',
    '{"b": "<tool_call></tool_call>[TOOL_CALLS]<|python_tag|></think>"}',
    '{"b": {"c": [[], {}, [1, {"d": null}]]}, "a": 7}',
)


def random_pieces(text: str, rng: random.Random) -> list[str]:
    """The text in up to a dozen pieces, some of them empty."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
