"""/v1/responses: requests as those of a chat, and answers as items and events."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.client import Response
from faser_trtllm.serving.openai.chat_template import ChatTemplate
from faser_trtllm.serving.openai.error import error_object
from faser_trtllm.serving.openai.request import parse_chat
from faser_trtllm.serving.openai.responses.items import Items
from faser_trtllm.serving.openai.responses.reply import ResponsesReply, named_event
from faser_trtllm.serving.openai.responses.request import parse_responses
from faser_trtllm.serving.openai.served_model import ServedModel
from tests.support.checkpoints import END_OF_TEXT

TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){{ c.id }}{% endfor %}
{%- if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}
{%- if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served(tokenizer):
    return ServedModel("faser", tokenizer, ChatTemplate(TEMPLATE, tokenizer, [END_OF_TEXT]), 4096)


def parse(served, asked, **fields):
    return parse_responses({"model": "faser", "input": asked} | fields, served)


def chat(served, *messages, **fields):
    return parse_chat({"model": "faser", "messages": list(messages)} | fields, served)


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ("hi", [user("hi")]),
        ([user("hi")], [user("hi")]),
        ([{"type": "message", "role": "developer", "content": "be brief"}, user("hi")],
         [{"role": "developer", "content": "be brief"}, user("hi")]),
        ([user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])], [user("ab")]),
        ([user("hi"), {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1",
                       "content": [{"type": "output_text", "text": "yes", "annotations": []}]}, user("go")],
         [user("hi"), {"role": "assistant", "content": "yes"}, user("go")]),
        ([user("hi"),
          {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
          {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
          {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
          {"type": "function_call_output", "call_id": "c1", "output": "sunny"}],
         [user("hi"),
          {"role": "assistant", "reasoning_content": "hm", "tool_calls": [
              {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
              {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
          {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]),
        ([user("hi"),
          {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
          {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
          {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
          {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"}],
         [user("hi"),
          {"role": "assistant", "reasoning_content": "hm\nso", "tool_calls": [
              {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
              {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}]),
    ],
)  # fmt: skip
def test_input_is_a_chats_messages(served, asked, messages):
    assert parse(served, asked).prompts == chat(served, *messages).prompts


def test_instructions_come_first_and_fields_are_those_of_a_chat(served):
    found = parse(
        served,
        "hi",
        instructions="be brief",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}},
        store=True,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
    )
    schema = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    same = chat(
        served,
        {"role": "system", "content": "be brief"},
        user("hi"),
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.5,
        reasoning_effort="low",
        response_format=schema,
    )
    assert (found.prompts, found.inputs) == (same.prompts, same.inputs)


def test_tools_are_those_of_a_chat(tokenizer):
    template = ChatTemplate(TEMPLATE, tokenizer, [END_OF_TEXT])
    calling = ServedModel("faser", tokenizer, template, 4096, "hermes")
    for choice, own in (("auto", "auto"), ({"type": "function", "name": "weather"},) * 2):
        other = {"type": "function", "function": {"name": "weather"}} if isinstance(own, dict) else choice
        found = parse(calling, "hi", tools=[TOOL], tool_choice=own)
        same = chat(calling, user("hi"), tools=[CHAT_TOOL], tool_choice=other)
        assert (found.prompts, found.inputs, found.parsing) == (same.prompts, same.inputs, same.parsing)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "input is null; it must be a text or a list of at least one item"),
        ({"input": []}, "input", "input is an array of length 0; it must be a text or a list"),
        ({"input": [user([{"type": "input_text", "text": "a"}] * 1025)]}, "input",
         "input[0].content is an array of length 1025; it must be a list of at most 1024 parts"),
        ({"input": [3]}, "input", "input[0].type is null, allowed are message"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", 'input[0].type is "item_reference", allowed'),
        ({"input": [user("a"), {"role": "boss", "content": "a"}]}, "input", 'input[1].role is "boss", allowed are'),
        ({"input": [user([{"type": "input_image", "image_url": "x"}])]}, "input",
         'part of type "input_image", allowed'),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}]}, "input",
         'input[0].name is "a b", allowed are 1 to 64 letters'),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": "["}]}, "input",
         "input[0].arguments is"),
        ({"instructions": 3}, "instructions", "instructions is a number; it must be a string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0, allowed is 1"),
        ({"temperature": 3}, "temperature", "temperature is 3, allowed is 0 to 2"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here; send the whole"),
        ({"background": True}, "background", "nothing runs in the background"),
        ({"truncation": "auto"}, "truncation", "nothing is left out of an input"),
        ({"include": ["file_search_call.results"]}, "include", "include is"),
        ({"tools": [{"type": "web_search"}]}, "tools", 'tools[0].type is "web_search", only function is supported'),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", 'tools[0].name is "a b", allowed are'),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", 'text.format.type is "grammar", allowed are text'),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format.schema is null"),
        ({"text": {"verbosity": "low"}}, "text", 'text has "verbosity", only format'),
        ({"reasoning": {"mode": 1}}, "reasoning", 'reasoning has "mode"'),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort is"),
        ({"metadata": {"a": 3}}, "metadata", 'metadata["a"] is a number; it must be a string'),
        ({"metadata": {"a": "b" * 999}}, "metadata", "1000 characters, allowed are at most 576"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata", "17"),
        ({"n": 2}, "n", '"n" is not a field of this request'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "must be an object with include_obfuscation"),
        ({"model": "other"}, "model", "other"),
        ({"input": "x " * 9000}, "input", "4096"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_this_request(served, fields, param, message):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_responses({"model": "faser", "input": "hi"} | fields, served)
    assert message in str(caught.value)
    assert "messages" not in str(caught.value)
    assert error_object(caught.value)["error"]["param"] == param


def put_together(events):
    """The items that a client makes of the events."""
    items = []
    for value in events:
        kind = value["type"]
        if kind == "response.output_item.added":
            assert value["output_index"] == len(items)
            items.append(value["item"])
        elif kind == "response.output_item.done":
            item = items[value["output_index"]]
            if item["type"] == "function_call":
                assert value["item"]["arguments"] == item["arguments"]
            else:
                assert value["item"]["content"] == item["content"]
            assert value["item"]["status"] in ("completed", "incomplete")
            items[value["output_index"]] = value["item"]
        else:
            item = items[value["output_index"]]
            assert (value["item_id"], value["output_index"]) == (item["id"], len(items) - 1)
            if kind == "response.content_part.added":
                item["content"] = [value["part"]]
            elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
                part = item["content"][value["content_index"]]
                item["content"] = [part | {"text": part["text"] + value["delta"]}]
            elif kind == "response.function_call_arguments.delta":
                item["arguments"] += value["delta"]
    return items


TEXTS = st.sampled_from(["a", "b ", "", "\n", "é"])
CONTENT = st.builds(lambda text: {"content": text}, TEXTS)
THOUGHT = st.builds(lambda text: {"reasoning_content": text, "reasoning": text}, TEXTS)


@st.composite
def call(draw, index):
    pieces = draw(st.lists(TEXTS, max_size=3))
    begin = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": "f", "arguments": ""}}
    return [{"tool_calls": [begin]}] + [
        {"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces
    ]


@st.composite
def deltas(draw):
    found = draw(st.lists(st.one_of(CONTENT, THOUGHT), max_size=6))
    for index in range(draw(st.integers(0, 3))):
        found += draw(call(index)) + draw(st.lists(CONTENT, max_size=1))
    return found


@given(deltas())
def test_events_add_up_to_the_output(found):
    items = Items()
    events = [value for delta in found for value in items.add(delta)]
    events += items.end("completed")
    output = put_together(events)
    assert output == items.output
    texts = dict.fromkeys(("message", "reasoning", "function_call"), "")
    for item in output:
        texts[item["type"]] += item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    assert texts["message"] == "".join(delta.get("content", "") for delta in found)
    assert texts["reasoning"] == "".join(delta.get("reasoning_content", "") for delta in found)
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    assert calls == [c["id"] for delta in found for c in delta.get("tool_calls", ()) if "id" in c]


def replies(served, deltas, **fields):
    """(whole answer, events) of the same deltas."""
    request = parse(served, "hi", **fields)
    whole = ResponsesReply(request, "faser", served.tokenizer)
    stream = ResponsesReply(request, "faser", served.tokenizer)
    events = []
    for delta in deltas:
        whole.add(0, delta)
        events += stream.chunks(0, delta)
    return whole.whole(), stream.first_chunks() + events + stream.last_chunks()


def without_ids(response):
    return {**response, "id": "", "output": [{**item, "id": ""} for item in response["output"]]}


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer_and_its_stream_are_the_same(served, reason, status):
    given_deltas = [Response("Hel", (1,)), Response("", ()), Response("lo", (2, 3), reason, 5, 3)]
    whole, events = replies(served, given_deltas, instructions="be brief", metadata={"a": "b"})
    assert [value["sequence_number"] for value in events] == list(range(len(events)))
    assert [value["type"] for value in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{status}"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert put_together(events[2:-1]) == events[-1]["response"]["output"]
    assert whole["status"] == status
    assert (whole["incomplete_details"] or {}).get("reason") == ("max_output_tokens" if reason == "length" else None)
    (message,) = whole["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert (whole["instructions"], whole["metadata"], whole["store"]) == ("be brief", {"a": "b"}, False)
    assert whole["usage"]["input_tokens"] == 5
    assert whole["usage"]["output_tokens"] == 3
    assert whole["usage"]["total_tokens"] == 8


def test_an_event_names_its_type(served):
    reply = ResponsesReply(parse(served, "hi"), "faser", served.tokenizer)
    first = named_event(reply.first_chunks()[0])
    head, data, rest = first.split(b"\n", 2)
    assert head == b"event: response.created"
    assert json.loads(data.removeprefix(b"data: "))["response"]["status"] == "in_progress"
    assert rest == b"\n"
