"""Messages of harmony in every order, with the parser of calls, that of reasoning, and both."""

import random
import re

import pytest

from tests.support.effort import pick
from tests.support.parsed_output import Parsed, Reading, random_text

CALL = ("f", None, '{"a": 1}')
COMMENTARY, AGAIN, A1 = "<|channel|>commentary", "<|end|><|start|>assistant<|channel|>", '{"a": 1}'
ANALYSIS = "<|channel|>analysis<|message|>"
MESSAGES = [
    # text, reasoning, content, calls
    (f"{ANALYSIS}Hm.{AGAIN}final<|message|>Hi.<|return|>", "Hm.", "Hi.", ()),
    (f"{ANALYSIS}A\n{AGAIN}analysis<|message|>B{AGAIN}commentary to=functions.f<|message|>{A1}", "A\nB", "", (CALL,)),
    (
        f"{ANALYSIS}A{AGAIN}commentary<|message|>P{AGAIN}analysis<|message|>B{AGAIN}final<|message|>C",
        "A\nB",
        "P\nC",
        (),
    ),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", ()),
    (f"{ANALYSIS}Hm.", "Hm.", "", ()),
    (f"{ANALYSIS}Hm. <|channel|>last<|message|>Hi", "Hm. <|channel|>last<|message|>Hi", "", ()),
    (f"{ANALYSIS}Hm.<|end|>Hi", "Hm.<|end|>Hi", "", ()),
    (f"{ANALYSIS}Hm.<|channel|>final<|message|>Hi.", "Hm.", "Hi.", ()),
    (f"{ANALYSIS}Hm.{AGAIN}fin", "Hm.", "<|start|>assistant<|channel|>fin", ()),
    (
        f"{ANALYSIS}Hm.{AGAIN}commentary to=g<|message|>x",
        "Hm.",
        "<|start|>assistant<|channel|>commentary to=g<|message|>x",
        (),
    ),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), MESSAGES)
def test_messages_of_harmony(text, reasoning, content, calls):
    assert Reading("openai", "openai_gptoss").parse(text) == Parsed(content, reasoning, calls)
    # Each parser alone: reasoning is left out, calls are content.
    assert Reading("openai").parse(text) == Parsed(content, "", calls)
    alone = Reading(None, "openai_gptoss").parse(text)
    assert (alone.reasoning, alone.calls) == (reasoning, ())
    assert alone.content == (text[text.index("<|start|>assistant<|channel|>comm") :] if calls else content)
    # A prompt that ends within the reasoning.
    if text.startswith(ANALYSIS):
        for shown in (None, "openai_gptoss"):
            begun = Reading("openai", shown, True).parse(text.removeprefix(ANALYSIS))
            assert begun == Parsed(content, reasoning if shown else "", calls)


HEADER = re.compile(
    r"""(?: \A\s* | <\|(?:end|return|call)\|>\s* | (?=<\|(?:start|channel)\|>) )
    (?P<header> (?:<\|start\|>\s*assistant\s*)? (?:to=\s*(?P<before>[^\s<]*)\s*)?
    <\|channel\|>\s*(?P<channel>analysis|commentary|final)(?![^\s<])\s* (?:to=\s*(?P<after>[^\s<]*)\s*)?
    (?:<\|constrain\|>\s*)? [^\s<]*\s* <\|message\|>)""",
    re.VERBOSE,
)


def test_no_character_is_lost_of_harmony_but_headers_and_the_marks_before_them():
    """Without functions, headers of commentary with a recipient are kept."""

    def left(found):
        return found["header"] if found["channel"] == "commentary" and (found["after"] or found["before"]) else ""

    rng = random.Random(8)
    num_headers = 0
    for _ in range(pick(3000, 50_000)):
        text = random_text("openai", rng) + " ] ] ]"  # so that no header is cut
        events = Reading("openai", "openai_gptoss", tools=()).events([text])
        shown = "".join(event.text for event in events)
        expected, num_found = HEADER.subn(left, text)
        assert "".join(shown.split()) == "".join(expected.split()), text
        num_headers += num_found
    assert num_headers > 1000
