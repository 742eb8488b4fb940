"""Options of `faser openai` that say nothing about a server that runs already."""

import dataclasses
import os
from pathlib import Path

import pytest

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.openai.server import OpenAIOptions, serve_openai
from tests.support.triton_server import free_ports


@pytest.mark.parametrize(
    ("name", "value"),
    [("config", Path("faser.yaml")), ("speculation", "fixed:3"), ("drafters", "suffix"), ("num_branches", 2)],
)
def test_what_a_running_server_cannot_take_is_refused(name, value):
    triton = dataclasses.replace(ServeOptions(), **{name: value})
    options = OpenAIOptions(url="grpc://127.0.0.1:1", triton=triton)
    with pytest.raises(InvalidArgumentError, match=rf"{name} is {value}, .*url grpc://127\.0\.0\.1:1 is already"):
        serve_openai(options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_without_a_key_the_api_stays_on_this_machine(host):
    with pytest.raises(InvalidArgumentError, match=r"host is .*no API key; set FASER_API_KEY, .*add --allow_no_key"):
        serve_openai(OpenAIOptions(url="grpc://127.0.0.1:1", host=host))


@pytest.mark.parametrize(
    "options", [{"host": "127.0.0.2"}, {"host": "0.0.0.0", "api_key": "k"}, {"host": "0.0.0.0", "allow_no_key": True}]
)
def test_where_it_may_listen_the_next_thing_is_triton(options):
    with pytest.raises(UnavailableError, match="no Triton server with a ready model answers"):
        serve_openai(OpenAIOptions(url="grpc://127.0.0.1:1", port=free_ports(1)[0], **options))


def test_the_key_is_not_left_in_the_environment(monkeypatch):
    """Triton and the engine process inherit the environment."""
    monkeypatch.setenv("FASER_API_KEY", "secret-key")
    with pytest.raises(UnavailableError):
        serve_openai(OpenAIOptions(url="grpc://127.0.0.1:1", port=free_ports(1)[0], api_key="secret-key"))
    assert "FASER_API_KEY" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("max_connections", 0, "1 to 65536"), ("stream_padding", 1 << 20, "0 to 16384"), ("stream_padding", -1, "0 to")],
)
def test_numbers_have_bounds(name, value, allowed):
    with pytest.raises(InvalidArgumentError, match=f"{name} is {value}, allowed is {allowed}"):
        serve_openai(OpenAIOptions(url="grpc://127.0.0.1:1", **{name: value}))


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_parsers_are_known_by_name(engine_dir, name):
    options = OpenAIOptions(url="grpc://127.0.0.1:1", triton=ServeOptions(engine_dir=engine_dir))
    with pytest.raises(InvalidArgumentError, match=rf"{name} is gpt, allowed are none, .*mistral"):
        serve_openai(dataclasses.replace(options, **{name: "gpt"}))
    with pytest.raises(UnavailableError, match="no Triton server with a ready model answers"):
        serve_openai(dataclasses.replace(options, port=free_ports(1)[0], **{name: "mistral"}))
