"""One row of the table of request fields reaches every door: Triton, TensorRT-LLM's names, OpenAI, Dynamo, `faser
generate`, the client library and the documents."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig
from typer.testing import CliRunner

from faser_trtllm.commands.table import load
from faser_trtllm.core.request_field import MAX_INT32, Bounds, rows
from faser_trtllm.core.sampling_params import SamplingFields, SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.client import to_tensor
from faser_trtllm.serving.dynamo.request import read_params
from faser_trtllm.serving.openai.request import ServedModel, parse_completion
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.triton.contract import MODELS
from faser_trtllm.serving.triton.request import parse_request
from tests.support.triton_server import ROOT

ROWS = rows(TextRequest)
SAMPLING = [row for row in rows(SamplingFields) if row.openai]
IN_STOP_CONDITIONS = ("max_tokens", "min_tokens")


def by_name(found):
    return pytest.mark.parametrize("row", found, ids=[row.name for row in found])


def value_of(row):
    """A value that every door allows, and that is not the default."""
    if row.kind is float:
        return 0.25 if row.openai_bounds is None or row.openai_bounds.hold(0.25) else 2.5
    value = {int: 3, bool: True, str: "x"}[row.kind]
    return (value,) if row.is_list else value


def wrong_values_of(bounds):
    return [value for value in (bounds.low - 1, bounds.high + 1, float("nan")) if not bounds.hold(value)]


def inputs_of(model):
    config = text_format.Parse((ROOT / "triton_model_repo" / model / "config.pbtxt").read_text(), ModelConfig())
    return {one.name: (DataType.Name(one.data_type).removeprefix("TYPE_"), list(one.dims)) for one in config.input}


@by_name(ROWS)
def test_triton_s_models_declare_and_read_it(row):
    dtype = "STRING" if row.dtype == "BYTES" else row.dtype
    dims = [-1] if row.is_list else [1]
    assert inputs_of("faser")[row.name] == (dtype, dims)
    theirs = inputs_of("tensorrt_llm")
    assert all(theirs[name] == (dtype, dims) for name in (row.trtllm, row.older_name) if name)
    value = value_of(row)
    for model, name in [("faser", row.name), ("faser", row.older_name), ("tensorrt_llm", row.trtllm)]:
        if name:
            prompt = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 4}
            asked = {"text_input": "a"} if model == "faser" else prompt
            tensors = {key: as_tensor(sent) for key, sent in (asked | {name: value}).items()}
            (part,) = parse_request(MODELS[model].canonical(tensors), MODELS[model])
            assert getattr(part.request, row.name) == value


def as_tensor(value):
    return np.array([[value]], object) if isinstance(value, str) else np.atleast_2d(np.array(value))


@by_name(ROWS)
def test_the_client_library_sends_it(row):
    tensor = to_tensor(row.name, value_of(row))
    kinds = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_, "BYTES": np.object_}
    assert tensor.shape == (1, 1)
    assert tensor.dtype == kinds[row.dtype]


def test_the_client_library_names_what_is_no_input():
    with pytest.raises(InvalidArgumentError, match="max_token is not an input of the model faser; leave it out"):
        to_tensor("max_token", 3)


@by_name([row for row in ROWS if row.openai])
def test_openai_s_door_takes_it_within_its_bounds(row):
    def inputs(value):
        sent = list(value) if row.is_list else value
        asked = {"model": "faser", "prompt": "a", row.openai: sent}
        ((_, found),) = parse_completion(asked, ServedModel("faser")).sequences()
        return found

    assert inputs(value_of(row))[row.name] == value_of(row)
    for value in wrong_values_of(row.openai_bounds) if row.openai_bounds is not None else ():
        if value == value:
            with pytest.raises(InvalidArgumentError) as caught:
                inputs(value)
            assert str(caught.value).startswith(f"{row.openai} is {value}, allowed is {row.openai_bounds.limit}")


@by_name(SAMPLING)
def test_dynamo_s_door_takes_it(row):
    part = "stop_conditions" if row.name in IN_STOP_CONDITIONS else "sampling_options"
    part = "extra_args" if row.name == "num_draft_tokens" else part
    request = {"token_ids": [1, 2], part: {row.name: value_of(row)}}
    assert getattr(read_params(request, 64, ()), row.name) == value_of(row)


def test_faser_generate_has_an_option_for_each():
    shown = CliRunner().invoke(load("generate"), ["--help"], env={"COLUMNS": "200"}).output
    assert [row.name for row in SAMPLING if f"--{row.name} " not in shown] == []


def check(kind, fields):
    if kind is SamplingParams:
        SamplingParams(**fields).validate(vocab_size=10)
    else:
        TextRequest(text="a", **fields).validate()


@by_name(ROWS)
def test_out_of_bounds_is_one_sentence_with_field_value_and_limit(row):
    for value in wrong_values_of(row.bounds) if row.bounds is not None else ():
        is_sampling = row in rows(SamplingFields)
        with pytest.raises(InvalidArgumentError) as caught:
            check(SamplingParams if is_sampling else TextRequest, {"max_tokens": 64} | {row.name: value})
        error = caught.value
        assert str(error) == f"{row.name} is {value}, allowed is {row.bounds.limit}"
        assert (error.field, error.value, error.limit) == (row.name, str(value), row.bounds.limit)


def test_text_requests_and_the_engine_share_the_sampling_fields():
    request = TextRequest(text="a", **{row.name: value_of(row) for row in rows(SamplingFields)})
    params = SamplingParams(**request.sampling_fields())
    shared = [field.name for field in dataclasses.fields(SamplingFields)]
    assert [getattr(params, name) for name in shared] == [getattr(request, name) for name in shared]


def test_a_parameter_is_named_once_beside_its_implementation():
    found = subprocess.run(
        ["git", "grep", "-l", "min_p", "--", *(f"faser_trtllm/{part}" for part in ("core", "serving", "commands"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["faser_trtllm/core/sampling_params.py"]


def test_the_documents_have_the_tables_of_today():
    script = ROOT / "scripts" / "write_request_fields.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("bounds", "limit", "inside", "outside"),
    [
        (Bounds(1024, 64 << 20), "1024 to 67108864", (1024, 64 << 20), (1023, (64 << 20) + 1)),
        (Bounds(-2.5, 1.0), "-2.5 to 1", (-2.5, 1.0), (-2.6, 1.1, float("nan"))),
        (Bounds(0.0, 1.0, above_low=True), "more than 0 and at most 1", (0.1, 1.0), (0.0, 10**400)),
        (Bounds(0.0, 1.0, below_high=True), "0 to less than 1", (0.0, 0.9), (1.0,)),
        (Bounds(1, MAX_INT32), "1 or more", (1, MAX_INT32), (0, MAX_INT32 + 1)),
    ],
)
def test_bounds_say_what_they_hold(bounds, limit, inside, outside):
    assert bounds.limit == limit
    assert [bounds.hold(value) for value in (*inside, *outside)] == [True] * len(inside) + [False] * len(outside)
