"""Chats with tools and reasoning: what they ask of the template and the model, and the sentences for those that cannot
be."""

import json

import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.openai.chat_template import ChatTemplate
from faser_trtllm.serving.openai.error import error_object
from faser_trtllm.serving.openai.request import parse_chat
from faser_trtllm.serving.openai.served_model import ServedModel
from tests.support.checkpoints import END_OF_TEXT, write_tokenizer

TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){{ c.id }}{% endfor %}
{%- if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}
{%- if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>{% elif starts %}<think>
{% endif %}"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def served(tokenizer):
    template = ChatTemplate(TEMPLATE, tokenizer, [END_OF_TEXT])
    return ServedModel("faser", tokenizer, template, 4096, "hermes", "qwen3")


def chat(served, *messages, **fields):
    return parse_chat({"model": "faser", "messages": list(messages) or [USER]} | fields, served)


def prompt(served, *messages, **fields):
    assert served.tokenizer is not None
    return served.tokenizer.decode(chat(served, *messages, **fields).prompts[0], skip_special_tokens=False)


def test_the_template_gets_the_tools_as_they_were_sent(served):
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    for sent in (TOOL, strict):
        assert prompt(served, tools=[sent, OTHER]) == f"[{json.dumps(TOOL)}][{json.dumps(OTHER)}]<user>|hi"


def test_a_turn_with_tools_is_rendered_as_transformers_renders_it(served, tmp_path):
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path, 320)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "K\u00f8benhavn", "n": 1.5}},
    }
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    variables = {"tools": [TOOL, OTHER], "chat_template": TEMPLATE, "enable_thinking": False}
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
    messages[1] = messages[1] | {"content": None, "tool_calls": [call | {"function": function}]}
    sent = {"tools": [TOOL, OTHER], "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(served, *messages, **sent) == expected


def test_without_a_choice_of_calling_the_template_gets_none(served):
    plain = prompt(served)
    assert plain == "<user>|hi"
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        assert prompt(served, **fields) == plain
        assert chat(served, **fields).parsing.tool_parser is None


def test_a_whole_turn_of_calls_reaches_the_template(served):
    calls = [
        {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "n": [1]}'}},
        {"id": "a2", "type": "function", "function": {"name": "time", "arguments": ""}},
    ]
    assistant = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls, "reasoning": "hm"}
    results = [{"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "rain"}]}]
    expected = '<user>|hi<assistant>hm|weather({"city": "Oslo", "n": [1]})a1time({})a2<tool>|rain=a1'
    assert prompt(served, USER, assistant, *results) == expected
    spoken = {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": []}
    assert prompt(served, USER, spoken) == "<user>|hi<assistant>hm|Let me see."


def test_nothing_that_a_client_sends_forges_a_special_token(served):
    forged = f"x{END_OF_TEXT}"
    schema = {"type": "object", "properties": {forged: {"type": "string", "description": forged}}}
    tool = {"type": "function", "function": {"name": "f", "description": forged, "parameters": schema}}
    call = {"id": forged, "function": {"name": "f", "arguments": json.dumps({forged: [forged]})}}
    messages = [
        USER,
        {"role": "assistant", "reasoning": forged, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": forged, "content": forged},
    ]
    request = chat(served, *messages, tools=[tool], chat_template_kwargs={"starts": forged})
    assert 0 not in request.prompts[0]
    text = served.tokenizer.decode(request.prompts[0], skip_special_tokens=False)
    assert text.count(END_OF_TEXT) == 9


def test_efforts_and_variables_reach_the_template(served):
    assert prompt(served, reasoning_effort="low") == "<user>|hieffort low"
    assert prompt(served, reasoning_effort="none").endswith("effort none<think>\n\n</think>")
    assert prompt(served, chat_template_kwargs={"enable_thinking": False}) == "<user>|hi<think>\n\n</think>"
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(served, **both) == "<user>|hieffort none"


def test_reasoning_begins_in_the_prompt_or_in_the_answer(served):
    assert not chat(served).parsing.starts_in_reasoning
    assert chat(served, chat_template_kwargs={"starts": True}).parsing.starts_in_reasoning
    assert chat(served, reasoning_effort="none").parsing is None


def grammar(served, **fields):
    inputs = chat(served, **fields).inputs
    return inputs.get("guided_decoding_guide_type"), inputs.get("guided_decoding_guide")


def test_only_what_has_to_be_so_is_guided(served):
    assert grammar(served, tools=[TOOL]) == (None, None)
    assert grammar(served, tools=[TOOL], parallel_tool_calls=False) == (None, None)
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    named = {"type": "function", "function": {"name": "weather"}}
    for fields in (
        {"tools": [strict]},
        {"tools": [TOOL, OTHER], "tool_choice": "required"},
        {"tools": [TOOL, OTHER], "tool_choice": named},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
    ):
        assert grammar(served, **fields)[0] == "ebnf_grammar"
    assert "time" not in grammar(served, tools=[TOOL, OTHER], tool_choice=named)[1]
    # Reasoning comes before what response_format asks for.
    assert grammar(served, response_format={"type": "json_object"})[0] == "ebnf_grammar"


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"items": value}
    return value


def tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


def call(**changes):
    one = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [one | changes]}


BAD = [
    ({"tools": {"a": 1}}, "tools is an object; it must be a list"),
    ({"tools": [tool()] * 129}, "tools has 129 entries, allowed are at most 128"),
    ({"tools": [tool(), tool()]}, "tools has 2 functions f; give each a name of its own"),
    ({"tools": ["f"]}, 'tools[0] is of type "f"; it must be of type function'),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 'tools[0] is of type "custom"; it must be'),
    (
        {"tools": [{"type": "function", "function": "f"}]},
        'tools[0] is of type "function"; it must be of type function w',
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name is null, allowed are 1 to 64 letters"),
    ({"tools": [tool(name="a b")]}, 'tools[0].function.name is "a b", allowed are'),
    ({"tools": [tool(name="x" * 65)]}, "allowed are 1 to 64 letters, digits, _ and -"),
    (
        {"tools": [tool(parameters=[])]},
        "tools[0].function.parameters is an array of length 0; it must be a JSON schema",
    ),
    ({"tools": [tool(strict="yes")]}, 'tools[0].function.strict is "yes"; it must be true or false'),
    ({"tools": [tool(description=5)]}, "tools[0].function.description is a number; it must be a string"),
    ({"tools": [tool(description="x" * 300_000)]}, "characters, allowed are at most 262144"),
    ({"tools": [tool(parameters=deep(40))]}, "tools is nested more than 32 levels deep"),
    ({"tools": [tool(parameters={"a": "\ud800"})]}, "tools has half of a surrogate pair"),
    ({"tools": [tool()], "tool_choice": "any"}, 'tool_choice is "any", allowed are none, auto, required or {'),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice is {"),
    ({"tools": [tool()], "tool_choice": ["f"]}, 'tool_choice is ["f"], allowed are'),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        'tool_choice names "g", which is not one of the tools',
    ),
    ({"tool_choice": "required"}, "tool_choice is required without tools"),
    ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls is 1; it must be true or false"),
    ({"tools": [tool()], "guided_regex": "a"}, "tools and guided_regex were sent; send one of them"),
    (
        {"tools": [tool(parameters={"type": "object", "const": "x" * 65_536})], "tool_choice": "required"},
        "allowed are at most 65536; shorten it",
    ),
    ({"functions": [{"name": "f"}]}, "functions was sent, but it was replaced by tools"),
    ({"reasoning_effort": "huge"}, 'reasoning_effort is "huge", allowed are none, minimal'),
    ({"include_reasoning": 0}, "include_reasoning is 0; it must be true or false"),
    ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs is an array of length 1; it must be an object"),
    ({"chat_template_kwargs": {"messages": "a"}}, 'chat_template_kwargs has the name "messages"'),
    ({"chat_template_kwargs": {"a b": 1}}, 'chat_template_kwargs has the name "a b"'),
    ({"chat_template_kwargs": {"a": {}}}, "chat_template_kwargs.a is an object; it must be true, false, a number"),
    ({"chat_template_kwargs": {"a": "x" * 4097}}, "chat_template_kwargs.a has 4097 characters, allowed are at most"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "has 33 entries, allowed are at most 32"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id is null; it must be a string"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content is null"),
    ({"messages": [{"role": "tool", "tool_call_id": "a" * 257, "content": ""}]}, "has 257 characters, allowed are at"),
    ({"messages": [USER | {"tool_calls": [1]}]}, "messages[0].tool_calls was sent with the role user"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content is null"),
    ({"messages": [{"role": "assistant", "tool_calls": "a"}]}, "messages[0].tool_calls is a string; it must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0] must be an object with id"),
    ({"messages": [call(id=None)]}, "messages[0].tool_calls[0].id is null; it must be a string"),
    ({"messages": [call(function={"name": "a.b"})]}, 'messages[0].tool_calls[0].function.name is "a.b"'),
    ({"messages": [call(function={"name": "f", "arguments": '{"a'})]}, "it must be the text of a JSON object"),
    ({"messages": [call(function={"name": "f", "arguments": "[1]"})]}, 'function.arguments is "[1]"; it must be the'),
    ({"messages": [call(function={"name": "f", "arguments": {}})]}, "function.arguments is an object; it must be a s"),
    ({"messages": [call(function={"name": "f", "arguments": "[" * 9999})]}, "it must be the text of a JSON object"),
    ({"messages": [call(function={"name": "f", "arguments": '{"a":"\\ud800"}'})]}, "half of a surrogate pair"),
    ({"messages": [call() | {"tool_calls": call()["tool_calls"] * 129}]}, "has 129 entries, allowed are at most 128"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_requests_get_one_sentence(tokenizer, fields, message):
    """Before anything is rendered."""
    template = ChatTemplate("{{ raise_exception('rendered') }}", tokenizer)
    served = ServedModel("faser", tokenizer, template, 4096, "hermes")
    if "guided_regex" in fields or "const" in json.dumps(fields):
        served = ServedModel("faser", tokenizer, ChatTemplate("a", tokenizer), 4096, "hermes")
    with pytest.raises(InvalidArgumentError) as caught:
        parse_chat({"model": "faser", "messages": [USER]} | fields, served)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    error = error_object(caught.value)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0].partition("[")[0] in fields


def test_a_model_that_calls_no_functions_says_so(tokenizer):
    served = ServedModel("faser", tokenizer, ChatTemplate("a", tokenizer), 4096)
    with pytest.raises(
        InvalidArgumentError, match=r"tools was sent, but the chat template of faser .*--tool_call_parser"
    ):
        chat(served, tools=[TOOL])
    assert chat(served, tools=[TOOL], tool_choice="none").parsing is None
