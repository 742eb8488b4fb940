"""Answers of a parser's events, whole and in deltas: one message however the text is cut. The parser is made up."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.serving.client import Response
from faser_trtllm.serving.openai.chat import answer
from faser_trtllm.serving.openai.chat.answer import Parsing
from faser_trtllm.serving.openai.chat_template import ChatTemplate
from faser_trtllm.serving.openai.reply import Reply
from faser_trtllm.serving.openai.request import parse_chat
from faser_trtllm.serving.openai.served_model import ServedModel
from faser_trtllm.serving.parsers.event import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from tests.support.effort import examples


class MadeUp:
    """Capitals are reasoning, f to h begin a call of that name, digits are its arguments, the rest is content; it holds
    back each text up to the next one."""

    def __init__(self):
        self._held = ""
        self._num_calls = 0

    def feed(self, text):
        found, self._held = self._held, text
        return [event for char in found for event in self._events(char)]

    def finish(self):
        return self.feed("")

    def _events(self, char):
        if char in "fgh":
            self._num_calls += 1
            yield ToolCallStart(self._num_calls - 1, char, "own" if char == "h" else None)
        elif char.isdigit() and self._num_calls:
            yield ToolArgumentsDelta(self._num_calls - 1, char)
        else:
            yield ReasoningDelta(char) if char.isupper() else ContentDelta(char)


@pytest.fixture(scope="module")
def made_up():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(answer, "make_parser", lambda *names, **options: MadeUp())
        yield


def reply(tokenizer, parsing, **fields):
    served = ServedModel("faser", tokenizer, ChatTemplate("a", tokenizer), 512)
    asked = {"model": "faser", "messages": [{"role": "user", "content": "a"}]} | fields
    return Reply(dataclasses.replace(parse_chat(asked, served), parsing=parsing), "faser", tokenizer)


def responses(tokenizer, text, cuts, reason):
    """The text in pieces, a token for each character."""
    ends = sorted({*cuts, len(text)})
    for start, end in itertools.pairwise([0, *ends]):
        ids = [tokenizer.token_id(char) for char in text[start:end]]
        is_last = end == len(text)
        yield Response(text[start:end], tuple(ids), reason if is_last else None, 3, end, log_probs=(-0.5,) * len(ids))


def whole(tokenizer, parsing, text, reason="stop", cuts=(), **fields):
    made = reply(tokenizer, parsing, **fields)
    for delta in responses(tokenizer, text, cuts, reason):
        made.add(0, delta)
    return made.whole()["choices"][0]


def streamed(tokenizer, parsing, text, reason="stop", cuts=(), **fields):
    """The choice that the chunks of a stream add up to."""
    made = reply(tokenizer, parsing, stream=True, **fields)
    chunks = [chunk for delta in responses(tokenizer, text, cuts, reason) for chunk in made.chunks(0, delta)]
    message, entries = {"content": ""}, []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if choice["logprobs"]:
            entries += choice["logprobs"]["content"]
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            (call,) = value
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert (call["index"], call["function"]["arguments"]) == (len(calls), "")
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return message, chunks[-1]["choices"][0]["finish_reason"], entries


def without_ids(message):
    calls = [{name: call[name] for name in call if name != "id"} for call in message.get("tool_calls") or []]
    return {name: value for name, value in (message | {"tool_calls": calls}).items() if value}


PARSING = Parsing("made up", "made up")


@settings(max_examples=examples(200))
@given(
    text=st.text("abAB12fgh", min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11), max_size=6),
    reason=st.sampled_from(["stop", "length"]),
    is_parallel=st.booleans(),
    shows_reasoning=st.booleans(),
)
def test_deltas_add_up_to_the_message(made_up, tokenizer, text, cuts, reason, is_parallel, shows_reasoning):
    parsing = dataclasses.replace(PARSING, is_parallel=is_parallel, shows_reasoning=shows_reasoning)
    cuts = {cut for cut in cuts if cut < len(text)}
    choice = whole(tokenizer, parsing, text, reason, logprobs=True)
    message, finish_reason, entries = streamed(tokenizer, parsing, text, reason, cuts, logprobs=True)
    assert without_ids(message) == {k: v for k, v in without_ids(choice["message"]).items() if k != "role"}
    assert finish_reason == choice["finish_reason"]
    assert entries == choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == text
    again = whole(tokenizer, parsing, text, reason, cuts)["message"]
    assert without_ids(again) == without_ids(choice["message"])


def test_usage_has_the_prompt_s_length_whichever_choice_comes_first(made_up, tokenizer):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    made = reply(tokenizer, PARSING, n=2, stream=True, stream_options=usage)
    chunks = []
    for number, index in enumerate((1, 1, 0), 1):
        (delta,) = responses(tokenizer, "ab" if number == 2 else "a", (), "stop" if number == 2 else None)
        chunks += [chunk for chunk in made.chunks(index, delta) if chunk["usage"]["completion_tokens"]]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_a_message_has_what_the_request_asks_for(made_up, tokenizer):
    text = "AaBf1g23"
    message = whole(tokenizer, PARSING, text)["message"]
    assert message["reasoning"] == message["reasoning_content"] == "AB"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": "1"},
        {"name": "g", "arguments": "23"},
    ]
    assert message["content"] == "a"
    assert whole(tokenizer, PARSING, "f1")["message"]["content"] is None
    assert whole(tokenizer, PARSING, "ab")["message"] == {
        "role": "assistant",
        "content": "ab",
        "refusal": None,
        "reasoning_content": None,
        "reasoning": None,
    }
    one = dataclasses.replace(PARSING, is_parallel=False, shows_reasoning=False)
    message = whole(tokenizer, one, text)["message"]
    assert len(message["tool_calls"]) == 1
    assert message["reasoning"] is None
    calls_only = dataclasses.replace(PARSING, reasoning_parser=None)
    assert "reasoning" not in whole(tokenizer, calls_only, "f1")["message"]


@pytest.mark.parametrize(
    ("text", "reason", "is_named", "expected"),
    [
        ("f1", "stop", False, "tool_calls"),
        ("f1", "stop", True, "stop"),
        ("f1", "length", False, "length"),
        ("a", "stop", False, "stop"),
    ],
)
def test_finish_reasons(made_up, tokenizer, text, reason, is_named, expected):
    parsing = dataclasses.replace(PARSING, is_named=is_named)
    assert whole(tokenizer, parsing, text, reason)["finish_reason"] == expected
    assert streamed(tokenizer, parsing, text, reason)[1] == expected


def test_ids_are_the_model_s_or_new_ones(made_up, tokenizer):
    ids = [call["id"] for call in whole(tokenizer, PARSING, "fgh")["message"]["tool_calls"]]
    assert len(set(ids)) == 3
    assert ids[2] == "own"
    assert all(one.startswith("call_") for one in ids[:2])
    short = dataclasses.replace(PARSING, tool_parser="mistral")
    (one,) = [call["id"] for call in whole(tokenizer, short, "f")["message"]["tool_calls"]]
    assert len(one) == 9
    assert one.isalnum()
