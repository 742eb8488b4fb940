"""JSON bodies of the OpenAI server and of Dynamo, guides, and answers as our client library reads them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import urllib.error
import urllib.request
from typing import Any
from unittest import mock

from faser_trtllm.errors import FaserError
from faser_trtllm.guided.grammar import source_of
from faser_trtllm.guided.spec import guide_spec
from faser_trtllm.serving import client
from faser_trtllm.serving.dynamo.request import read_params, read_token_ids
from faser_trtllm.serving.openai.chat_template import ChatTemplate
from faser_trtllm.serving.openai.error import error_object
from faser_trtllm.serving.openai.fields import Fields, parse_object
from faser_trtllm.serving.openai.guide import guide_inputs
from faser_trtllm.serving.openai.request import GenerationRequest, ServedModel, parse_chat, parse_completion
from faser_trtllm.serving.openai.responses.reply import ResponsesReply
from faser_trtllm.serving.openai.responses.request import parse_responses
from tests.fuzz.scratch import JSON, from_json
from tests.fuzz.target import Codec, Target
from tests.fuzz.targets.served import TEMPLATE, tokenizer

# OpenAI


@functools.cache
def _openai() -> ServedModel:
    template = ChatTemplate(TEMPLATE, tokenizer(), ["<|endoftext|>", "<|begin|>"], bos_token="<|begin|>", eos_token="")
    return ServedModel("m", tokenizer(), template, 512, "hermes", "qwen3")


def _use(request: GenerationRequest) -> None:
    for prompt, inputs in request.sequences():
        for name, value in inputs.items():
            client.to_tensor(name, value)
        if not isinstance(prompt, str):
            client.to_tensor("input_ids", list(prompt))


def run_completion(data: bytes) -> None:
    try:
        _use(parse_completion(parse_object(data), _openai()))
    except FaserError as error:
        json.dumps(error_object(error)).encode()


def run_chat(data: bytes) -> None:
    try:
        _use(parse_chat(parse_object(data), _openai()))
    except FaserError as error:
        json.dumps(error_object(error)).encode()


def run_responses(data: bytes) -> None:
    try:
        request = parse_responses(parse_object(data), _openai())
    except FaserError as error:
        json.dumps(error_object(error)).encode()
    else:
        _use(request)
        ResponsesReply(request, "m", None).first_chunks()


SAMPLING: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "n": 2,
    "stop": ["a", "b"],
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "logit_bias": {"5": 1.5, "6": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "user": "u",
    "cache_salt": "s",
    "ignore_eos": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}


def completion_seeds() -> list[bytes]:
    prompts: tuple[Any, ...] = ("hello", ["a", "b"], [5, 6], [[5], [6, 7]])
    found = [{"model": "m", "prompt": prompt} for prompt in prompts]
    found += [SAMPLING | {"prompt": "a", "logprobs": 3, "echo": True}, {"model": "m", "prompt": "a", "echo": True}]
    found += [{"model": "m", "prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1, "best_of": 1, "suffix": ""}]
    return [json.dumps(entry).encode() for entry in found]


def chat_seeds() -> list[bytes]:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "<|endoftext|>"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "n"}]
    chat = {"messages": messages, "model": "m"}
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "null"}}},
    }
    tools = [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "g", "strict": True}},
    ]
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"}]
    turns.append({"role": "tool", "tool_call_id": "i", "content": "x"})
    named = {"type": "function", "function": {"name": "f"}}
    thinking = {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1, "b": "x"}, "include_reasoning": False}
    found = [chat, SAMPLING | chat | {"logprobs": True, "top_logprobs": 2}]
    found += [chat | thinking | {"messages": [*messages, *turns], "tools": tools, "parallel_tool_calls": False}]
    found += [chat | {"tools": tools, "tool_choice": choice} for choice in ("none", "auto", "required", named)]
    found += [chat | {"max_completion_tokens": 3, "max_tokens": 3}]
    return [json.dumps(entry).encode() for entry in found]


def responses_seeds() -> list[bytes]:
    parts = [{"type": "input_text", "text": "a"}]
    items = [
        {"type": "message", "role": "user", "content": parts},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
    schema = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    more = {"instructions": "i", "metadata": {"k": "v"}, "reasoning": {"effort": "low", "summary": "auto"}}
    found = [{"model": "m", "input": "a"}, {"model": "m", "input": items, **more}]
    found += [{"model": "m", "input": "a", "text": schema, "max_output_tokens": 5, "stream": True}]
    named = {"type": "function", "name": "f"}
    found += [{"model": "m", "input": "a", "tools": tools, "tool_choice": choice} for choice in ("auto", named)]
    return [json.dumps(entry).encode() for entry in found]


# guides


def run_guide(data: bytes) -> None:
    """Fields of a body to a guide in the library's format; the rest happens in a process that may end."""
    _, inputs = guide_inputs(Fields(parse_object(data)))
    spec = guide_spec(inputs.get("guided_decoding_guide_type"), inputs.get("guided_decoding_guide"))
    if spec is not None:
        with contextlib.suppress(Exception):
            source_of(spec)


GRAMMAR = 'root ::= "a" b* | [a-z]+\nb ::= ("x" | "y")? # comment\n'


def guide_seeds() -> list[bytes]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}}, "required": ["a"]}
    found: list[dict[str, Any]] = [
        {"guided_json": schema},
        {"guided_json": json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}})},
        {"guided_regex": "[a-z]{2,5}(x|y)?"},
        {"guided_grammar": GRAMMAR},
        {"guided_grammar": 'start: "a" b*\nb: /[a-z]+/ | "x" "y"\n'},
        {"guided_choice": ["yes", "no.", "a|b"]},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": {"grammar": GRAMMAR}},
    ]
    return [json.dumps(entry).encode() for entry in found]


# Dynamo


def run_dynamo(data: bytes) -> None:
    given = from_json(data, dict)
    if isinstance(given.get("token_ids"), str):
        given["token_ids"] = given["token_ids"].encode(errors="replace")
    read_token_ids(given)
    read_params(given, 512, (0,))


def dynamo_seeds() -> list[bytes]:
    whole = {
        "token_ids": [1, 2, 3],
        "sampling_options": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "seed": 3,
            "n": 1,
            "logit_bias": {"5": 1.0},
        },
        "stop_conditions": {"max_tokens": 5, "min_tokens": 1, "ignore_eos": False, "stop_token_ids_hidden": [4]},
        "output_options": {"logprobs": 0},
        "extra_args": {"num_draft_tokens": 2},
        "eos_token_ids": [0],
    }
    return [
        json.dumps(entry).encode()
        for entry in (whole, {"token_ids": [5]}, {"token_ids": "abcd"}, {"token_ids": [5], "cache_salt_id": 4})
    ]


# the client


def run_client(data: bytes) -> None:
    """Answers of a server, as the client library reads them: the first byte says which."""
    kind, body = data[:1], data[1:]
    if kind == b"e":
        client.response_error(body.decode(errors="replace"))
    elif kind == b"h":
        failed = urllib.error.HTTPError("http://x", 400, "", None, io.BytesIO(body))  # type: ignore[arg-type]
        with _answering(failed):
            client.generate_http("http://x", "a")
    else:
        with _answering(io.BytesIO(body)):
            if kind == b"s":
                list(client.stream_http("http://x", "a"))
            else:
                client.generate_http("http://x", "a")


def _answering(answer: Any) -> Any:
    effect = {"side_effect": answer} if isinstance(answer, Exception) else {"return_value": answer}
    opener = mock.Mock(**{"open.side_effect" if isinstance(answer, Exception) else "open.return_value": answer})
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(urllib.request, "urlopen", **effect))
    patches.enter_context(mock.patch.object(urllib.request, "build_opener", return_value=opener))
    return patches


def client_seeds() -> list[bytes]:
    answer: dict[str, Any] = {"model_name": "faser", "text_output": "a", "finish_reason": "stop", "output_ids": [1, 2]}
    answer |= {"output_log_probs": [-0.1, -0.2], "output_top_ids": [1, 2, 3, 4], "output_top_log_probs": [0.0] * 4}
    answer |= {"num_input_tokens": 3, "context_ids": [4, 5], "context_log_probs": [-1.0], "output_is_draft": [True]}
    event = b"data: " + json.dumps(answer).encode() + b"\n\n"
    record = {"code": "INVALID_ARG", "field": "top_k", "value": "-1", "limit": "0", "message": "top_k is -1"}
    return [
        b"g" + json.dumps(answer).encode(),
        b"g" + json.dumps({"error": "x"}).encode(),
        b"s" + event + event + b'data: {"error": "y"}\n\n',
        b"e" + json.dumps(record).encode(),
        b"eplain words",
        b'h{"error": "no"}',
        b'hdata: {"error": "no"}',
    ]


def _decode_answer(data: bytes) -> Any:
    if data[:1] == b"s":
        return [data[:1], [json.loads(line[6:]) for line in data[1:].split(b"\n") if line]]
    return [data[:1], json.loads(data[1:])]


def _encode_answer(value: Any) -> bytes:
    kind, body = value
    assert isinstance(kind, bytes)
    if kind == b"s":
        return kind + b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in body)
    return kind + json.dumps(body).encode()


_OPENAI = ("serving/openai/request.py", "serving/openai/fields.py")
_CHAT = tuple(f"serving/openai/chat/{name}.py" for name in ("conversation", "message", "tools", "template_args"))

TARGETS = (
    Target("openai_completion", run_completion, completion_seeds, _OPENAI, JSON, words=tuple(SAMPLING)),
    Target(
        "openai_chat",
        run_chat,
        chat_seeds,
        (*_OPENAI, *_CHAT),
        JSON,
        words=(*SAMPLING, "role", "content", "user", "assistant", "tool", "tools", "tool_calls", "function"),
    ),
    Target(
        "openai_responses",
        run_responses,
        responses_seeds,
        ("serving/openai/responses/request.py",),
        JSON,
        words=("input", "instructions", "type", "function_call", "function_call_output", "input_text", "format"),
    ),
    Target("guide", run_guide, guide_seeds, ("serving/openai/guide.py", "guided/spec.py"), JSON),
    Target("dynamo_request", run_dynamo, dynamo_seeds, ("serving/dynamo/request.py",), JSON),
    Target("client", run_client, client_seeds, ("serving/client.py",), Codec(_decode_answer, _encode_answer)),
)
