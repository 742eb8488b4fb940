"""The Triton contract, frozen: names, dtypes, dims and optionality of TensorRT-LLM's models, against our repository.

A change here is a change of the interface that users of TensorRT-LLM's inflight_batcher_llm repository rely on.
"""

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.client import INPUT_DTYPES
from faser_trtllm.serving.triton.contract import ALIASES, INPUTS, MODELS, REFUSED, WITHOUT_EFFECT
from faser_trtllm.serving.triton.request import parse_request
from tests.support.triton_server import ROOT

REPOSITORY = ROOT / "triton_model_repo"
LOGITS = "FP32"

# name: dtype dims; required unless it ends with "?"
TEXT_INPUTS = """
text_input: STRING 1
max_tokens: INT32 1
decoder_text_input: STRING 1 ?
num_return_sequences: INT32 1 ?
bad_words: STRING -1 ?
stop_words: STRING -1 ?
exclude_input_in_output: BOOL 1 ?
end_id: INT32 1 ?
pad_id: INT32 1 ?
top_k: INT32 1 ?
top_p: FP32 1 ?
temperature: FP32 1 ?
length_penalty: FP32 1 ?
repetition_penalty: FP32 1 ?
presence_penalty: FP32 1 ?
frequency_penalty: FP32 1 ?
min_tokens: INT32 1 ?
seed: UINT64 1 ?
return_log_probs: BOOL 1 ?
return_context_logits: BOOL 1 ?
return_generation_logits: BOOL 1 ?
return_perf_metrics: BOOL 1 ?
return_num_input_tokens: BOOL 1 ?
return_num_output_tokens: BOOL 1 ?
beam_width: INT32 1 ?
stream: BOOL 1 ?
prompt_embedding_table: FP16 -1,-1 ?
prompt_table_extra_id: UINT64 1 ?
prompt_vocab_size: INT32 1 ?
embedding_bias_words: STRING -1 ?
embedding_bias_weights: FP32 -1 ?
lora_task_id: UINT64 1 ?
lora_weights: FP16 -1,-1 ?
lora_config: INT32 -1,3 ?
guided_decoding_guide_type: STRING 1 ?
guided_decoding_guide: STRING 1 ?
"""

BLS_INPUTS = """
image_input: FP16 -1,3,-1,-1 ?
image_bytes_input: UINT8 -1,-1,-1,-1 ?
video_bytes_input: UINT8 -1,-1,-1,-1 ?
image_url_input: STRING 1 ?
num_draft_tokens: INT32 1 ?
use_draft_logits: BOOL 1 ?
"""

TOKEN_INPUTS = f"""
input_lengths: INT32 1
request_output_len: INT32 1
input_ids: INT32 -1 ?
draft_input_ids: INT32 -1 ?
decoder_input_ids: INT32 -1 ?
draft_logits: {LOGITS} -1,-1 ?
draft_acceptance_threshold: FP32 1 ?
encoder_input_features: FP16 -1,-1 ?
encoder_output_lengths: INT32 1 ?
decoder_input_lengths: INT32 1 ?
num_return_sequences: INT32 1 ?
end_id: INT32 1 ?
pad_id: INT32 1 ?
beam_width: INT32 1 ?
min_tokens: INT32 1 ?
stop_words_list: INT32 2,-1 ?
bad_words_list: INT32 2,-1 ?
embedding_bias: FP32 -1 ?
temperature: FP32 1 ?
runtime_top_p: FP32 1 ?
runtime_top_p_min: FP32 1 ?
runtime_top_p_decay: FP32 1 ?
runtime_top_k: INT32 1 ?
runtime_top_p_reset_ids: INT32 1 ?
len_penalty: FP32 1 ?
repetition_penalty: FP32 1 ?
presence_penalty: FP32 1 ?
frequency_penalty: FP32 1 ?
beam_search_diversity_rate: FP32 1 ?
early_stopping: BOOL 1 ?
exclude_input_in_output: BOOL 1 ?
stop: BOOL 1 ?
streaming: BOOL 1 ?
seed: UINT64 1 ?
return_log_probs: BOOL 1 ?
return_context_logits: BOOL 1 ?
return_generation_logits: BOOL 1 ?
return_perf_metrics: BOOL 1 ?
return_num_input_tokens: BOOL 1 ?
return_num_output_tokens: BOOL 1 ?
prompt_embedding_table: FP16 -1,-1 ?
prompt_table_extra_ids: UINT64 -1 ?
prompt_vocab_size: INT32 1 ?
cross_attention_mask: BOOL -1,-1 ?
mrope_rotary_cos_sin: FP32 -1 ?
mrope_position_deltas: INT64 1 ?
lora_task_id: UINT64 1 ?
lora_weights: FP16 -1,-1 ?
lora_config: INT32 -1,3 ?
context_phase_params: UINT8 -1 ?
skip_cross_attn_blocks: BOOL 1 ?
retention_token_range_starts: INT32 -1 ?
retention_token_range_ends: INT32 -1 ?
retention_token_range_priorities: INT32 -1 ?
retention_token_range_durations_ms: INT32 -1 ?
retention_decode_priority: INT32 1 ?
retention_decode_duration_ms: INT32 1 ?
guided_decoding_guide_type: STRING 1 ?
guided_decoding_guide: STRING 1 ?
lookahead_window_size: INT32 1 ?
lookahead_ngram_size: INT32 1 ?
lookahead_verification_set_size: INT32 1 ?
"""

# Older clients (up to 0.18) send these.
OLD_INPUTS = """
return_kv_cache_reuse_stats: BOOL 1 ?
min_length: INT32 1 ?
random_seed: UINT64 1 ?
"""

CORE_OUTPUTS = f"""
cum_log_probs: FP32 -1
output_log_probs: FP32 -1,-1
context_logits: {LOGITS} -1,-1
generation_logits: {LOGITS} -1,-1,-1
batch_index: INT32 1
sequence_index: INT32 1
kv_cache_alloc_new_blocks: INT32 1
kv_cache_reused_blocks: INT32 1
kv_cache_alloc_total_blocks: INT32 1
arrival_time_ns: INT64 1
first_scheduled_time_ns: INT64 1
first_token_time_ns: INT64 1
last_token_time_ns: INT64 1
acceptance_rate: FP32 1
total_accepted_draft_tokens: INT32 1
total_draft_tokens: INT32 1
num_input_tokens: INT32 1
num_output_tokens: INT32 1
"""

TEXT_OUTPUTS = "text_output: STRING -1\n" + CORE_OUTPUTS
TOKEN_OUTPUTS = "output_ids: INT32 -1,-1\nsequence_length: INT32 -1\ncontext_phase_params: UINT8 -1\n" + CORE_OUTPUTS

# A field of TensorRT-LLM's executor (uint64) that its own Triton models do not pass on.
EXECUTOR_INPUTS = """
cache_salt_id: UINT64 1 ?
"""

CONTRACT = {
    "ensemble": (TEXT_INPUTS + OLD_INPUTS + EXECUTOR_INPUTS, TEXT_OUTPUTS),
    "tensorrt_llm_bls": (TEXT_INPUTS + BLS_INPUTS + OLD_INPUTS + EXECUTOR_INPUTS, TEXT_OUTPUTS),
    "tensorrt_llm": (TOKEN_INPUTS + OLD_INPUTS + EXECUTOR_INPUTS, TOKEN_OUTPUTS),
}


def rows(table):
    """{name: (dtype, dims, is_optional)}"""
    found = {}
    for line in table.split("\n"):
        if line:
            name, rest = line.split(": ")
            dtype, dims, *optional = rest.split()
            found[name] = (dtype, [int(dim) for dim in dims.split(",")], bool(optional))
    return found


def config_of(model):
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), ModelConfig())


def declared(tensors):
    return {
        t.name: (DataType.Name(t.data_type).removeprefix("TYPE_"), list(t.dims), getattr(t, "optional", False))
        for t in tensors
    }


@pytest.mark.parametrize("model", CONTRACT)
def test_the_configuration_declares_the_contract(model):
    config = config_of(model)
    inputs, outputs = CONTRACT[model]
    assert declared(config.input) == rows(inputs)
    assert declared(config.output) == rows(outputs)
    assert len(config.input) == len(rows(inputs)), "an input is declared twice"


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_decoupled_batched_and_run_by_our_backend(model):
    config = config_of(model)
    assert config.name == model
    assert config.backend == "faser"
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 64
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 2)]  # one on the CPU
    assert (REPOSITORY / model / "1").is_dir(), "Triton wants a version"


def test_our_own_model_takes_what_ensemble_takes():
    """Its own additions besides; nothing that TensorRT-LLM's clients send is unknown to it."""
    ours, theirs = declared(config_of("faser").input), declared(config_of("tensorrt_llm_bls").input)
    added = {"input_ids", "min_p", "priority", "timeout_ms", "stop", "return_is_draft", "drafters", "cache_salt"}
    added |= {"logit_bias_ids", "logit_bias_values", "return_context_log_probs", "num_top_log_probs"}
    added |= {
        "return_acceptance",
        "prediction",
        "allowed_token_ids",
        "add_special_tokens",
        "parse_special_tokens",
        "skip_special_tokens",
    }
    assert set(ours) == set(theirs) | added
    for name in theirs:
        assert ours[name][:2] == theirs[name][:2], name
    assert all(optional for _, _, optional in ours.values())
    outputs, core = declared(config_of("faser").output), declared(config_of("ensemble").output)
    assert {name: outputs[name] for name in core} == core
    added = {"output_ids", "output_is_draft", "finish_reason", "num_cached_tokens", "context_ids", "context_log_probs"}
    added |= {f"acceptance_{what}" for what in ("histogram", "drafted", "accepted")}
    added |= {f"{what}_prediction_tokens" for what in ("accepted", "rejected")}
    added |= {f"{which}_top_{what}" for which in ("output", "context") for what in ("ids", "log_probs")}
    assert set(outputs) - set(core) == added


@pytest.mark.parametrize("model", CONTRACT)
def test_cache_salt_id_is_read_by_every_model(model):
    inputs = {"text_input": np.array([[b"a"]], object), "max_tokens": np.array([[4]], np.int32)}
    if model == "tensorrt_llm":
        ones = {name: np.array([[1]], np.int32) for name in ("input_ids", "input_lengths", "request_output_len")}
        inputs = ones
    inputs["cache_salt_id"] = np.array([[2**64 - 1]], np.uint64)
    (part,) = parse_request(MODELS[model].canonical(inputs), MODELS[model])
    assert SamplingParams(**part.request.sampling_fields()).salt == f"{2**64 - 1}:"


@pytest.mark.parametrize(("model", "parses"), [("faser", False), ("ensemble", True), ("tensorrt_llm_bls", True)])
def test_special_tokens_of_a_prompt_are_read_by_tensorrt_llm_s_models(model, parses):
    def request(**more):
        inputs = {"text_input": [[b"a"]], "max_tokens": [[4]]} | more
        tensors = {name: np.array(value, object if name == "text_input" else None) for name, value in inputs.items()}
        configured = {"add_special_tokens": False, "skip_special_tokens": False}
        (part,) = parse_request(MODELS[model].canonical(tensors), MODELS[model], defaults=configured)
        return part.request

    assert request().parse_special_tokens == parses
    assert (request().add_special_tokens, request().skip_special_tokens) == (False, False)
    for asked in (False, True):
        assert request(parse_special_tokens=[[asked]]).parse_special_tokens == asked
        assert request(add_special_tokens=[[asked]]).add_special_tokens == asked


OF_TOKENS = ("input_lengths", "stop_words_list", "bad_words_list", "embedding_bias", "runtime_top_p_decay")
"""Inputs that only `tensorrt_llm` has."""


@pytest.mark.parametrize("model", MODELS)
def test_every_input_is_read_or_refused_or_said_to_have_no_effect(model):
    contract = MODELS[model]
    for name in declared(config_of(model).input):
        ours = contract.renames.get(name) or ALIASES.get(name, name)
        kinds = [ours in {*INPUTS, *OF_TOKENS}, name in REFUSED, ours in WITHOUT_EFFECT]
        assert sum(kinds) == 1, (name, kinds)


def test_our_client_knows_the_inputs_of_our_model():
    dtypes = {name: dtype for name, (dtype, _, _) in declared(config_of("faser").input).items()}
    for name, dtype in INPUT_DTYPES.items():
        assert dtypes[name] == ("STRING" if dtype == "BYTES" else dtype), name


def something(dtype, dims):
    shape = [1, *(2 if dim == -1 else dim for dim in dims)]
    if dtype == "STRING":
        return np.full(shape, b"x", dtype=object)
    kinds = {"FP16": np.float16, "FP32": np.float32, "BOOL": np.bool_}
    return np.ones(shape, kinds.get(dtype) or np.dtype(dtype.lower()))


def nothing(dtype):
    return np.array([[b"" if dtype == "STRING" else 0]], dtype=object if dtype == "STRING" else None)


REFUSALS = [(m, n, d[0], d[1]) for m in MODELS for n, d in declared(config_of(m).input).items() if n in REFUSED]


@pytest.mark.parametrize(("model", "name", "dtype", "dims"), REFUSALS, ids=[f"{m}-{n}" for m, n, _, _ in REFUSALS])
def test_what_cannot_be_is_refused_by_name(model, name, dtype, dims):
    contract = MODELS[model]
    with pytest.raises(InvalidArgumentError) as caught:
        contract.canonical({name: something(dtype, dims)})
    assert str(caught.value).startswith(f"{name} was sent, but ")
    if dims == [1]:
        assert contract.canonical({name: nothing(dtype)}) is not None


def minimal(model):
    if model == "tensorrt_llm":
        return {
            "input_ids": np.array([[1, 2]], np.int32),
            "input_lengths": np.array([[2]], np.int32),
            "request_output_len": np.array([[4]], np.int32),
        }
    return {"text_input": np.array([[b"x"]], object), "max_tokens": np.array([[4]], np.int32)}


OTHERS = [("beam_width", 2, np.int32, "beam_width is 2")]
OTHERS_OF_TOKENS = [*OTHERS, ("runtime_top_p_decay", 0.5, np.float32, "runtime_top_p_decay is 0.5")]


@pytest.mark.parametrize("model", MODELS)
def test_values_that_cannot_be_are_refused_by_name(model):
    contract = MODELS[model]
    for name, value, dtype, message in OTHERS_OF_TOKENS if model == "tensorrt_llm" else OTHERS:
        tensors = minimal(model) | {name: np.array([[value]], dtype)}
        with pytest.raises(InvalidArgumentError, match=message):
            parse_request(contract.canonical(tensors), contract)


MISSING = [
    ("ensemble", "max_tokens", "max_tokens is missing"),
    ("ensemble", "text_input", "the prompt is missing"),
    ("tensorrt_llm", "request_output_len", "max_tokens is missing"),
    ("tensorrt_llm", "input_lengths", "input_lengths is missing"),
    ("tensorrt_llm", "input_ids", "the prompt is missing, send input_ids"),
]


def parse_checked(tensors, contract):
    """Parse as Triton's process does and check as the engine's process does."""
    for part in parse_request(contract.canonical(tensors), contract):
        part.request.validate()
        part.request.guide()


@pytest.mark.parametrize(("model", "name", "message"), MISSING)
def test_missing_inputs_are_named(model, name, message):
    """Triton counts required inputs but does not look which ones came."""
    contract = MODELS[model]
    tensors = minimal(model)
    del tensors[name]
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        parse_checked(tensors, contract)
    if name == "request_output_len":
        assert caught.value.sentence(contract.names).startswith("request_output_len is missing")


def test_an_input_under_two_names_is_refused():
    tensors = minimal("ensemble") | {"seed": np.array([[1]], np.uint64), "random_seed": np.array([[2]], np.uint64)}
    with pytest.raises(InvalidArgumentError, match="seed was sent twice"):
        MODELS["ensemble"].canonical(tensors)


def values(**fields):
    kinds = {int: np.int32, float: np.float32, bool: np.bool_}
    return {name: np.array([[value]], kinds[type(value)]) for name, value in fields.items()}


GREEDY = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "runtime_top_p": 0.0},
    {"runtime_top_k": 1, "temperature": 2.0},
]
SAMPLED = [{"runtime_top_k": 5}, {"runtime_top_p": 0.9}, {"runtime_top_k": 0, "runtime_top_p": 1.0, "temperature": 0.5}]


def test_what_is_greedy_in_tensorrt_llm_is_greedy_here():
    contract = MODELS["tensorrt_llm"]
    for fields, is_greedy in [(f, True) for f in GREEDY] + [(f, False) for f in SAMPLED]:
        (part,) = parse_request(contract.canonical(minimal("tensorrt_llm") | values(**fields)), contract)
        r = part.request
        assert SamplingParams(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p).is_greedy == is_greedy, fields
    ours = MODELS["faser"]
    (part,) = parse_request(ours.canonical(minimal("faser") | values(temperature=1.0)), ours)
    assert not SamplingParams(temperature=part.request.temperature, top_k=part.request.top_k).is_greedy


@pytest.mark.parametrize("model", MODELS)
def test_guides_are_read_and_empty_ones_are_none(model):
    contract = MODELS[model]
    names = ("guided_decoding_guide_type", "guided_decoding_guide")
    asked = [(b"regex", b"[a-z]+"), (b"json", None), (b"json", b""), (b"", b""), (b"", None)]
    expected = [("regex", "[a-z]+"), ("json", None), ("json", None), (None, None), (None, None)]
    for texts, found in zip(asked, expected, strict=True):
        guide = {n: np.array([[t]], object) for n, t in zip(names, texts, strict=True) if t is not None}
        (part,) = parse_request(contract.canonical(minimal(model) | guide), contract)
        assert (part.request.guided_decoding_guide_type, part.request.guided_decoding_guide) == found


WRONG_GUIDES = [
    (b"structural_tag", b"{}", "guided_decoding_guide_type is structural_tag, allowed are json, json_schema, regex,"),
    (b"", b"{}", "guided_decoding_guide was sent without guided_decoding_guide_type"),
    (b"regex", b"", "guided_decoding_guide is missing, the type regex needs one"),
    (b"json", b"{}", "guided_decoding_guide was sent with the type json"),
    (b"regex", b"\xff", "guided_decoding_guide is not valid UTF-8 at byte 0"),
    (b"regex", b"a" * 65537, "guided_decoding_guide has 65537 bytes, allowed are at most 65536"),
]


@pytest.mark.parametrize(("guide_type", "guide", "message"), WRONG_GUIDES)
def test_guides_that_cannot_be_are_one_sentence(guide_type, guide, message):
    tensors = minimal("ensemble") | {
        "guided_decoding_guide_type": np.array([[guide_type]], object),
        "guided_decoding_guide": np.array([[guide]], object),
    }
    with pytest.raises(InvalidArgumentError, match=message):
        parse_checked(tensors, MODELS["ensemble"])


def test_log_probs_are_normalized_where_they_are_asked_for_and_the_model_says_so():
    contract = MODELS["ensemble"]
    for asked, normalized in [(True, True), (True, False), (False, True)]:
        tensors = minimal("ensemble") | values(return_log_probs=asked)
        (part,) = parse_request(tensors, contract, normalize_log_probs=normalized)
        assert part.request.normalize_log_probs == (asked and normalized)


def test_a_batch_times_its_sequences_with_seeds_of_their_own():
    tensors = {
        "text_input": np.array([[b"x"], [b"y"]], object),
        "max_tokens": np.array([[4], [5]], np.int32),
        "num_return_sequences": np.array([[2], [3]], np.int32),
        "seed": np.array([[7], [2**64 - 1]], np.uint64),
    }
    parts = parse_request(tensors, MODELS["ensemble"])
    assert [(p.batch_index, p.sequence_index, p.request.text, p.request.max_tokens) for p in parts] == [
        (0, 0, "x", 4),
        (0, 1, "x", 4),
        (1, 0, "y", 5),
        (1, 1, "y", 5),
        (1, 2, "y", 5),
    ]
    step = 0x9E3779B97F4A7C15
    assert [p.request.seed for p in parts] == [7, 7 + step, 2**64 - 1, step - 1, (2 * step - 1) % 2**64]
    short = tensors | {"seed": np.array([[7]], np.uint64)}
    with pytest.raises(InvalidArgumentError, match="seed has batch size 1, other inputs have 2"):
        parse_request(short, MODELS["ensemble"])
