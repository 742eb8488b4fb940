"""Outputs of models: calls and reasoning, which are the same in whatever pieces the text comes."""

from __future__ import annotations

import random
import re
from typing import Any

from tests.fuzz.target import Codec, Target
from tests.support.parsed_output import ARGUMENTS, FAMILIES, REASONING, WRITERS, Reading, parsed, random_pieces

MAX_BYTES = 1 << 18  # the text is parsed three times
HOSTILE = ("[]", "\\", '""', "{", "< \n")
MAX_SMALL = 256  # characters at the beginning that come one by one


def run_output(data: bytes) -> None:
    """The first byte chooses the parsers, the second one the pieces."""
    kind, seed = (*data[:2], 0, 0)[:2]
    family = FAMILIES[kind % len(FAMILIES)]
    kind //= len(FAMILIES)
    reading = Reading(family, (None, *REASONING)[kind % (1 + len(REASONING))], kind // (1 + len(REASONING)) % 2 == 1)
    text = data[2:].decode(errors="replace")
    whole = reading.parse(text)
    assert reading.parse(*random_pieces(text, random.Random(seed))) == whole
    parser = reading.open()
    events = [event for char in text[:MAX_SMALL] for event in parser.feed(char)]
    assert whole.is_begun_by(parsed(events))
    assert parsed([*events, *parser.feed(text[MAX_SMALL:]), *parser.finish()]) == whole


def output_seeds() -> list[bytes]:
    found = []
    for family, write in WRITERS.values():
        kind = FAMILIES.index(family)
        calls = write([("f", '{"a": 1}'), ("get_time", ARGUMENTS[4])])
        thinks = len(FAMILIES) * 3  # with qwen3's marks
        for shift, text in ((0, f"Hi.\n{calls}"), (thinks, f"<think>\nhm\n</think>\n\n{calls}"), (0, calls[:-30])):
            found.append(bytes([kind + shift, 7]) + text.encode())
        begun, _, _ = write([("f", '{"b": 0}')]).partition("0")
        found.append(bytes([kind, 7]) + (begun + HOSTILE[len(found) % len(HOSTILE)] * 50_000).encode())
        found.append(bytes([kind, 7]) + (calls[:12] * 300).encode())
    return found


MAX_PIECES = 300
WORDS: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>")
WORDS = (
    *WORDS,
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "```json",
    "<think>",
    "</think>",
    '{"name":"f","arguments":{',
)
WORDS = (*WORDS, "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>")
_PIECES = re.compile("(" + "|".join(map(re.escape, WORDS)) + r"|[{}\[\]\",:\n])")


def _decode(data: bytes) -> Any:
    return [data[:2], _PIECES.split(data[2:].decode(), MAX_PIECES)]


def _encode(value: Any) -> bytes:
    head, pieces = value
    assert isinstance(head, bytes)
    return head + "".join(pieces).encode()


_MODULES = ("json_call", "parser", "reader", "registry", "sink", "tool_parser", "xml_call")

TARGETS = (
    Target(
        "model_output",
        run_output,
        output_seeds,
        tuple(f"serving/parsers/{name}.py" for name in _MODULES),
        Codec(_decode, _encode),
        words=WORDS,
        max_bytes=MAX_BYTES,
    ),
)
