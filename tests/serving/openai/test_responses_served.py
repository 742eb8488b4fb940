"""OpenAI's client asks /v1/responses of `faser openai`, real engines and a real Triton server."""

import json

import openai
import pydantic
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.openai_frontend import Frontend
from tests.support.scripted_model import write_scripted
from tests.support.triton_server import free_ports

pytestmark = [pytest.mark.triton, pytest.mark.slow]

GREEDY = {"model": "faser", "temperature": 0, "max_output_tokens": 24}


def chat_text(client, *messages):
    answer = client.chat.completions.create(
        model="faser", messages=list(messages), temperature=0, max_completion_tokens=24
    )
    return answer.choices[0].message.content, answer.usage


def test_a_response_is_a_chats_answer(client):
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve 😀"}
    text, usage = chat_text(client, system, user)
    response = client.responses.create(**GREEDY, instructions="be brief", input="naïve 😀")
    assert response.output_text == text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == usage.completion_tokens == 24
    assert response.usage.input_tokens == usage.prompt_tokens
    again = client.responses.create(**GREEDY, input=[system, user])
    assert again.output_text == text


def test_a_conversation_goes_on_with_the_items_of_the_last_answer(client):
    first = client.responses.create(**GREEDY, input="hello")
    history = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "and then"}]
    response = client.responses.create(**GREEDY, input=history)
    said = {"role": "assistant", "content": first.output_text}
    text, _ = chat_text(client, {"role": "user", "content": "hello"}, said, {"role": "user", "content": "and then"})
    assert response.output_text == text


def test_a_stream_adds_up_and_ends_with_the_response(client):
    whole = client.responses.create(**GREEDY, input="hello")
    with client.responses.stream(**GREEDY, input="hello") as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_schema_is_kept(client):
    class Point(pydantic.BaseModel, extra="forbid"):
        x: int = pydantic.Field(ge=0, le=9)
        is_odd: bool

    parsed = client.responses.parse(model="faser", input="hello", text_format=Point, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Point)


def test_what_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="nothing is stored here; send the whole conversation"):
        client.responses.create(model="faser", input="hello", previous_response_id="resp_1")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}]}]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].content has a part of type \"input_image\""):
        client.responses.create(model="faser", input=image)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.responses.create(model="faser", input="x " * 600)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


CALL = ("<think>", "They ask", " for it.", "</think>", "\n\n", "<tool_call>", "\n", '{"name"', ': "weath')
CALL += ('er", "argu', 'ments": {"ci', 'ty": "Par', "is", '"}', "}\n", "</tool_call>")
SCRIPTS = {"<|call|>": CALL, "<|answer|>": ("It is ", "sunny in ", "Lille", ".")}
LOOP = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[-1].role == 'tool' %}<|answer|>{% else %}<|call|>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A client of a model that thinks, calls a function, and answers with what it got."""
    directory = tmp_path_factory.mktemp("scripted")
    added = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    checkpoint = write_scripted(directory / "model", SCRIPTS, LOOP, added)
    sizes = {"max_batch_size": 4, "max_seq_len": 1024, "max_draft_len": 4, "tokens_per_block": 16}
    build_engines(BuildOptions(checkpoint, checkpoint, directory / "engine", **sizes))
    names = ("--http_port", "--grpc_port", "--metrics_port")
    ports = [word for name, port in zip(names, free_ports(), strict=True) for word in (name, port)]
    parsers = ("--tool_call_parser", "hermes", "--reasoning_parser", "qwen3")
    with (
        Frontend(directory / "log", "--engine_dir", directory / "engine", *ports, *parsers) as frontend,
        frontend.wait_ready().client() as client,
    ):
        yield client


@pytest.mark.parametrize("streams", [False, True])
def test_the_loop_of_function_calling(scripted, streams):
    def ask(items):
        fields = {"model": "faser", "temperature": 0, "tools": TOOLS, "input": items}
        if not streams:
            return scripted.responses.create(**fields)
        with scripted.responses.stream(**fields) as stream:
            return stream.get_final_response()

    items = [{"role": "user", "content": "how is the weather in Paris?"}]
    first = ask(items)
    assert first.status == "completed"
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    thought, call = first.output
    assert thought.content[0].text.strip() == "They ask for it."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert ask(items).output_text == "It is sunny in Lille."
