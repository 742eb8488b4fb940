"""OpenAI's client through a whole loop of function calling: a model that says what the test wrote, several tokens a
step, and a small random one under guided decoding."""

import contextlib
import json
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.effort import pick
from tests.support.openai_frontend import Frontend
from tests.support.scripted_model import write_scripted
from tests.support.triton_server import free_ports

pytestmark = [pytest.mark.triton, pytest.mark.slow]

CALL = ("<tool_call>", "\n", '{"name"', ': "weath', 'er", "argu', 'ments": {"ci', 'ty": "Par', "is", '"}', "}\n")
CALL += ("</tool_call>",)
BOTH = ("<think>", "They want", " both", ": two <", "calls>.", "</think>", "\n\nLet me ", "look.\n", "<tool_call>\n{")
BOTH += (
    '"name": "weather", ',
    '"arguments": {"city": "Os',
    "lo ",
    "\u00f8",
    '"}}\n</tool',
    "_call>",
    "\n<tool_call>\n",
)
BOTH += ('{"name": "ti', 'me", "arguments": ', "{}", "}\n</tool_call", ">")  # so each > ends an answer that may end
ANSWER = ("It is ", "sunny in ", "Paris", ".")
WRONG = ("<tool_call>\n", '{"name": "days", "arguments": {"count": ', '"many"', "}}", "\n</tool_call>")
SILENT = ("I would ", "rather ", "talk.")
SPECIAL = ("Well", "[TOOL_CALLS]", '[{"name": "time",', ' "arguments"', ": {}}", "]")
SCRIPTS = {
    "<|special|>": SPECIAL,
    "<|call|>": CALL,
    "<|both|>": BOTH,
    "<|answer|>": ANSWER,
    "<|wrong|>": WRONG,
    "<|silent|>": SILENT,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[-1].role == 'tool' %}<|answer|>"
    "{% elif messages[-1].content == 'both' %}<|both|>"
    "{% elif messages[-1].content == 'wrong' %}<|wrong|>"
    "{% elif messages[-1].content == 'silent' %}<|silent|>"
    "{% elif messages[-1].content == 'special' %}<|special|>"
    "{% else %}<|call|>{% endif %}"
)
PARSERS = ("--tool_call_parser", "hermes", "--reasoning-parser", "qwen3")


def function(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name} | ({"parameters": parameters} if parameters else {}) | more}


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
COUNT = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 9}}}
COUNT |= {"required": ["count"], "additionalProperties": False}
TOOLS = [function("weather", CITY | {"additionalProperties": False}), function("time")]


@contextlib.contextmanager
def scripted(directory, speculation):
    """A client of the scripted model, which drafts for itself."""
    names = ("--http_port", "--grpc_port", "--metrics_port")
    ports = [word for name, port in zip(names, free_ports(), strict=True) for word in (name, port)]
    arguments = ("--engine_dir", directory, "--speculation", speculation, *ports, *PARSERS)
    log = directory / f"{speculation.replace(':', '_')}.log"
    with Frontend(log, *arguments) as frontend, frontend.wait_ready().client() as client:
        yield client, ports[3]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    added = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
    checkpoint = write_scripted(directory / "model", SCRIPTS, TEMPLATE, added)
    sizes = {"max_batch_size": 4, "max_seq_len": 1024, "max_draft_len": 6, "tokens_per_block": 16}
    build_engines(BuildOptions(checkpoint, checkpoint, directory / "engine", **sizes))
    return directory / "engine"


@pytest.fixture(scope="module")
def server(engines):
    with scripted(engines, "fixed:4") as found:
        yield found


@pytest.fixture(scope="module")
def script(server):
    return server[0]


@contextlib.contextmanager
def read_by(engines, server, tool_call_parser):
    """A client of the same model, which may not think, and whose calls another parser reads."""
    parsers = ("--tool_call_parser", tool_call_parser, "--reasoning_parser", "none")
    arguments = ("--url", f"127.0.0.1:{server[1]}", "--engine_dir", engines, *parsers)
    log = engines / f"{tool_call_parser}.log"
    with Frontend(log, *arguments) as frontend, frontend.wait_ready().client() as client:
        yield client


@pytest.fixture(scope="module")
def thoughtless(engines, server):
    with read_by(engines, server, "hermes") as client:
        yield client


@pytest.fixture(scope="module")
def mistral(engines, server):
    with read_by(engines, server, "mistral") as client:
        yield client


def ask(client, content, stream=False, messages=None, **fields):
    """(message without ids, finish reason, ids of the calls), the same for a stream, whose deltas are put together."""
    asked = {"model": "faser", "messages": messages or [{"role": "user", "content": content}]}
    asked |= {"temperature": 0, "max_tokens": 200} | fields
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        message = choice.message.model_dump(exclude_none=True)
        reason = choice.finish_reason
    else:
        message, reason = {"content": ""}, None
        for chunk in client.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            assert reason is None
            reason = choice.finish_reason
            delta = choice.delta.model_dump(exclude_none=True)
            for call in delta.pop("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message.setdefault("role", delta.pop("role", "assistant"))
            for name, text in delta.items():
                message[name] = message.get(name, "") + text
        if not message["content"] and message.get("tool_calls"):
            del message["content"]
        for call in message.get("tool_calls", []):
            del call["index"]
    ids = [call.pop("id") for call in message.get("tool_calls", [])]
    return message, reason, ids


@pytest.mark.parametrize("stream", [False, True])
def test_the_whole_loop(script, stream):
    messages = [{"role": "user", "content": "Is it sunny in Paris?"}]
    message, reason, (call_id,) = ask(script, "", stream, messages, tools=TOOLS)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert message == {"role": "assistant", "tool_calls": [call]}
    assert reason == "tool_calls"
    messages += [
        message | {"tool_calls": [call | {"id": call_id}]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]
    message, reason, _ = ask(script, "", stream, messages, tools=TOOLS)
    assert (message["content"], reason) == ("It is sunny in Paris.", "stop")
    assert "tool_calls" not in message


def test_the_client_s_own_runner_of_tools(script):
    """Which sends back the message as it came, with all fields."""
    messages = [{"role": "user", "content": "Is it sunny in Paris?"}]
    answer = script.chat.completions.create(model="faser", messages=messages, tools=TOOLS, temperature=0)
    messages.append(answer.choices[0].message)
    for call in answer.choices[0].message.tool_calls:
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    answer = script.chat.completions.create(model="faser", messages=messages, tools=TOOLS, temperature=0)
    assert answer.choices[0].message.content == "It is sunny in Paris."
    with script.chat.completions.stream(model="faser", messages=messages[:1], tools=TOOLS, temperature=0) as stream:
        final = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in final.tool_calls] == ["weather"]


def test_the_chat_template_tells_the_parsers(engines, server, tmp_path):
    (tmp_path / "template").write_text(TEMPLATE + "{# says <think>, and writes arguments #}")
    arguments = ("--url", f"127.0.0.1:{server[1]}", "--engine_dir", engines, "--chat_template", tmp_path / "template")
    with Frontend(tmp_path / "log", *arguments) as frontend, frontend.wait_ready().client() as client:
        message, reason, _ = ask(client, "both", tools=TOOLS)
    assert (message["reasoning"], message["tool_calls"], reason) == (REASONING, CALLS, "tool_calls")


REASONING = "They want both: two <calls>."
CALLS = [
    {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo \u00f8"}'}},
    {"type": "function", "function": {"name": "time", "arguments": "{}"}},
]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_parallel_calls(script, stream):
    message, reason, ids = ask(script, "both", stream, tools=TOOLS)
    assert message["tool_calls"] == CALLS
    assert message["reasoning"] == message["reasoning_content"] == REASONING
    assert message["content"].strip() == "Let me look."
    assert (reason, len(set(ids))) == ("tool_calls", 2)
    one, _, _ = ask(script, "both", stream, tools=TOOLS, parallel_tool_calls=False)
    assert one["tool_calls"] == CALLS[:1]
    hidden, _, _ = ask(script, "both", stream, tools=TOOLS, extra_body={"include_reasoning": False})
    assert not hidden.keys() & {"reasoning", "reasoning_content"}
    assert hidden["tool_calls"] == CALLS
    cut, reason, _ = ask(script, "both", stream, tools=TOOLS, max_tokens=12)
    assert reason == "length"
    assert cut["tool_calls"][0]["function"]["arguments"] == CALLS[0]["function"]["arguments"][:15]
    without, reason, _ = ask(script, "both", stream)
    assert without["reasoning"] == REASONING
    assert "<tool_call>" in without["content"]
    assert reason == "stop"


def test_every_policy_gives_one_answer(script, engines):
    """Whatever it drafts, streamed or not: a step may accept any number of tokens, across every mark."""
    others = pick(["fixed:6"], ["off", "fixed:6,mode=draft_ahead", "fixed:6,mode=ping_pong", "gp_lcb"])
    asks = [{"content": "both", "tools": TOOLS}, {"content": "sunny?", "tools": TOOLS}, {"content": "both"}]
    asks.append({"content": "both", "tools": TOOLS, "stop": ["</tool"]})
    expected = [ask(script, **asked, extra_body={"num_draft_tokens": 0})[:2] for asked in asks]
    assert expected[0][0]["tool_calls"] == CALLS

    def check(client, drafts):
        for asked, wanted in zip(asks, expected, strict=True):
            for stream in (False, True):
                assert ask(client, stream=stream, **asked, extra_body={"num_draft_tokens": drafts})[:2] == wanted

    for drafts in pick((1, 4, 6), range(1, 7)):
        check(script, drafts)
    for speculation in others:
        with scripted(engines, speculation) as (client, _):
            check(client, 6)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_and_usage_count_all_tokens(script, stream):
    asked = {"tools": TOOLS, "logprobs": True, "model": "faser", "temperature": 0}
    asked["messages"] = [{"role": "user", "content": "both"}]
    num_tokens = len(BOTH)
    if stream:
        chunks = list(script.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        usage = chunks[-1].usage
        found = [chunk.choices[0].logprobs for chunk in chunks[:-1]]
        tokens = [entry.token for one in found if one for entry in one.content]
    else:
        answer = script.chat.completions.create(**asked)
        usage = answer.usage
        tokens = [entry.token for entry in answer.choices[0].logprobs.content]
    assert "".join(tokens) == "".join(BOTH)
    assert len(tokens) == usage.completion_tokens == num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_would_not_call_has_to(thoughtless, stream):
    """Its own choice is masked; what is left of it fits the schema."""
    named = {"type": "function", "function": {"name": "days"}}
    tools = [*TOOLS, function("days", COUNT)]
    for choice, names in ((named, {"days"}), ("required", {"days", "weather", "time"})):
        message, reason, _ = ask(
            thoughtless, "silent", stream, tools=tools, tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        assert "count" not in arguments or arguments["count"] in range(1, 10)
        assert reason == ("stop" if choice is named else "tool_calls")
        assert message.get("content") is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_marks_that_are_special_tokens_are_read_and_not_shown(mistral, stream, choice):
    for drafts in (0, 1, 6):
        fields = {"tools": TOOLS, "tool_choice": choice, "extra_body": {"num_draft_tokens": drafts}}
        message, reason, (call_id,) = ask(mistral, "special", stream, **fields, parallel_tool_calls=False)
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "time"
        assert json.loads(call["function"]["arguments"]) == {}
        assert message.get("content") == (None if choice == "required" else "Well")
        assert reason == "tool_calls"
        assert len(call_id) == 9  # as Mistral's templates want it
    plain, _, _ = ask(mistral, "special", stream)
    assert plain["content"] == "".join(SPECIAL).replace("[TOOL_CALLS]", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_function_has_no_wrong_arguments(script, stream):
    loose, _, _ = ask(script, "wrong", stream, tools=[function("days", COUNT)])
    assert loose["tool_calls"][0]["function"]["arguments"] == '{"count": "many"}'
    for drafts in (0, 4):
        body = {"num_draft_tokens": drafts}
        strict = [function("days", COUNT, strict=True)]
        message, reason, _ = ask(script, "wrong", stream, tools=strict, extra_body=body)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["count"] in range(1, 10)
        assert reason == "tool_calls"
        free, reason, _ = ask(script, "silent", stream, tools=strict, extra_body=body)
        assert (free["content"], reason) == ("I would rather talk.", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_before_a_forced_call(script, stream):
    for drafts in (0, 5):
        fields = {"tools": TOOLS, "tool_choice": "required", "extra_body": {"num_draft_tokens": drafts}}
        message, reason, _ = ask(script, "both", stream, **fields)
        assert message["reasoning"] == REASONING
        assert {call["function"]["name"] for call in message["tool_calls"]} <= {"weather", "time"}
        assert not (message.get("content") or "").strip()
        assert reason == "tool_calls"


class Trip(pydantic.BaseModel):
    """Plan a trip."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome", "K\u00f8benhavn"]
    days: Annotated[int, pydantic.Field(ge=1, le=30)]
    moods: Annotated[list[Literal["good", "bad"]], pydantic.Field(max_length=2)]
    note: Annotated[str, pydantic.Field(max_length=6)]


class Stop(pydantic.BaseModel):
    """End the trip."""

    model_config = pydantic.ConfigDict(extra="forbid")
    is_final: bool


MODELS = {"Trip": Trip, "Stop": Stop}
RANDOM_TOOLS = [function(name, model.model_json_schema()) for name, model in MODELS.items()]


@pytest.fixture(scope="module")
def random(triton, engine_dir, tmp_path_factory):
    """A client of the random pair, whose texts make no sense at all."""
    log = tmp_path_factory.mktemp("random") / "log"
    arguments = ("--url", f"grpc://{triton.grpc_url}", "--engine_dir", engine_dir, "--tool-call-parser", "hermes")
    with Frontend(log, *arguments) as frontend, frontend.wait_ready().client() as client:
        yield client


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Trip"}}], ids=["required", "named"]
)
def test_forced_calls_of_a_random_model_follow_their_schemas(random, choice):
    called = set()
    for seed in range(pick(4, 20)):
        fields = {"tools": RANDOM_TOOLS, "tool_choice": choice, "seed": seed, "temperature": 1, "max_tokens": 480}
        fields["parallel_tool_calls"] = False
        found = [
            ask(random, "hi", stream, **fields, extra_body={"num_draft_tokens": drafts})[:2]
            for stream in (False, True)
            for drafts in (0, 4)
        ]
        assert found[1:] == found[:1] * 3
        message, reason = found[0]
        (call,) = message["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        MODELS[name].model_validate_json(arguments)
        assert reason == ("tool_calls" if choice == "required" else "stop")
        called.add(name)
    assert called == ({"Trip", "Stop"} if choice == "required" else {"Trip"})


def test_the_client_parses_strict_arguments_itself(random):
    """OpenAI's `parse` sends strict functions only, and reads their arguments into its models."""
    tools = [openai.pydantic_function_tool(model) for model in (Trip, Stop)]
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required"}
    for seed in range(3):
        answer = random.chat.completions.parse(
            model="faser", **asked, seed=seed, max_tokens=480, parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Trip | Stop)


def test_a_random_model_that_may_call_says_anything(random):
    """Its text is not held back or lost on the way through the parser."""
    plain, _, _ = ask(random, "hi", seed=1, temperature=1, max_tokens=60)
    for stream in (False, True):
        for tools in (RANDOM_TOOLS, [openai.pydantic_function_tool(Trip)]):
            message, reason, _ = ask(random, "hi", stream, seed=1, temperature=1, max_tokens=60, tools=tools)
            assert reason in ("stop", "length")
            if tools is RANDOM_TOOLS:
                assert message["content"] == plain["content"]


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(random):
    tools = [function("f", {"type": "object", "properties": {"a": {"not": {"type": "string"}}}})]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(random, "hi", tools=tools, tool_choice="required")
    assert refused.value.body["param"] == "tools"
    assert refused.value.body["message"].startswith("tools ")
