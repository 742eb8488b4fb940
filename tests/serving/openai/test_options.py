"""Options of `faser openai` that say nothing about a server that runs already."""

import dataclasses
from pathlib import Path

import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.openai.server import OpenAIOptions, serve_openai


@pytest.mark.parametrize(
    ("name", "value"),
    [("config", Path("faser.yaml")), ("speculation", "fixed:3"), ("drafters", "suffix"), ("num_branches", 2)],
)
def test_what_a_running_server_cannot_take_is_refused(name, value):
    triton = dataclasses.replace(ServeOptions(), **{name: value})
    options = OpenAIOptions(url="grpc://127.0.0.1:1", triton=triton)
    with pytest.raises(InvalidArgumentError, match=rf"{name} is {value}, .*url grpc://127\.0\.0\.1:1 runs; start that"):
        serve_openai(options)
