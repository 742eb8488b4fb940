"""The recorded API surface, the stand-ins generated from it, and the gate in front of the real package."""

import importlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import ConfigError
from faser_trtllm.trtllm import gate
from faser_trtllm.trtllm.kv_cache import TrtllmKVCacheManager
from lab.trtllm_check.api_surface import (
    DRAFTER,
    RECORDED,
    SCHEDULER,
    Symbol,
    load_api_surface,
    load_entries,
    signature,
)
from tests.trtllm import fakes

BATCH_MANAGER = "tensorrt_llm.bindings.internal.batch_manager"
MODULES = fakes.build()


def request(modules, **options):
    bindings = modules[BATCH_MANAGER]
    sampling = modules["tensorrt_llm.bindings"].SamplingConfig(1)
    arguments = {"request_id": 0, "max_new_tokens": 4, "input_tokens": [1, 2], "sampling_config": sampling}
    return bindings.LlmRequest(**arguments | {"is_streaming": False} | options)


SURFACES = [load_api_surface(SCHEDULER, "1.2"), *(load_api_surface(DRAFTER, r) for r in gate.DRAFTER_RELEASES)]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: f"{surface.name}-{surface.release}")
def test_every_entry_says_where_it_comes_from_and_how_sure_it_is(surface):
    sources = json.loads((RECORDED / f"{surface.name}-{surface.release}.json").read_text())["sources"]
    assert "could be read" in surface.recorded_from or "could not be read" in surface.recorded_from
    assert len(surface.entries) > 9
    for entry in surface.entries.values():
        assert entry.confidence in (surface.release, "?")
        assert entry.source in sources, entry.name
        assert entry.kind in ("class", "enum", "function", "value")


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: f"{surface.name}-{surface.release}")
def test_every_argument_of_the_bindings_has_a_type(surface):
    untyped = [
        f"{entry.name}.{name}: {parameter.name}"
        for entry in surface.entries.values()
        if entry.binding == "nanobind"
        for name, arguments in entry.callables.items()
        for parameter in signature(arguments).parameters.values()
        if parameter.annotation == "object"
    ]
    assert untyped in ([], UNTOLD)


UNTOLD = [f"{BATCH_MANAGER}.LlmRequest.__init__: {name}" for name in ("logits_post_processor", "allotted_time_ms")]
"""Arguments whose types the bindings do not name; we pass neither."""


def test_arguments_in_the_recorded_spelling():
    parsed = signature(["a", "b?", "/", "c=None", "d: str = 'x'", "e=LlmRequestState.CONTEXT_INIT", "*", "f=1", "**g"])
    bare = [p.replace(default=p.empty, annotation=p.empty) for p in parsed.parameters.values()]
    assert str(parsed.replace(parameters=bare)) == "(a, b, /, c, d, e, *, f, **g)"
    assert [parsed.parameters[name].annotation for name in "cd"] == ["object", "str"]
    assert parsed.parameters["e"].default == Symbol("LlmRequestState.CONTEXT_INIT")
    assert [parsed.parameters[name].default for name in "cdf"] == [None, "x", 1]


def test_a_call_that_the_api_surface_does_not_know_fails():
    modules = fakes.build()
    request(modules, end_id=3)
    with pytest.raises(TypeError, match="eos_id"):
        request(modules, eos_id=3)
    with pytest.raises(TypeError, match="request_id"):
        cache(modules).add_token(request_id=0)
    with pytest.raises(TypeError, match="missing a required argument"):
        cache(modules).remove_sequence(0, None)


def test_attributes_that_the_api_surface_does_not_know_fail():
    made = request(fakes.build())
    made.draft_tokens = [0, 0]
    made.draft_tokens = None
    assert made.num_draft_tokens == 2, "TensorRT-LLM's setter ignores None"
    made.draft_tokens = []
    assert made.num_draft_tokens == 0
    made.py_draft_tokens = [0]
    with pytest.raises(AttributeError, match="has no setter"):
        made.num_draft_tokens = 3
    with pytest.raises(AttributeError, match="no attribute 'draft_token'"):
        made.draft_token = [0]
    with pytest.raises(AttributeError):
        _ = made.num_tokens


def cache(modules, num_blocks=4, **arguments):
    usual = {
        "num_kv_heads_per_layer": [1],
        "size_per_head": 8,
        "tokens_per_block": 4,
        "blocks_per_window": {64: (num_blocks, 0)},
        "max_num_sequences": 4,
        "max_beam_width": 1,
        "max_attention_window_vec": [64],
        "temp_attention_window_inputs": None,
        "dtype": modules["tensorrt_llm.bindings"].DataType.HALF,
        "sink_token_length": 0,
        "stream": 0,
        "max_sequence_length": 64,
    }
    return modules[BATCH_MANAGER].KVCacheManager(**usual | arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        {"size_per_head": [8]},  # as it was recorded once, and as a development branch has it
        {"num_kv_heads_per_layer": 1},
        {"blocks_per_window": {64: [4, 0]}},
        {"max_attention_window_vec": [64.0]},
        {"dtype": "HALF"},
        {"enable_block_reuse": 0},
        {"stream": None},
        {"temp_attention_window_inputs": 0},
    ],
)
def test_an_argument_of_another_type_fails(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} is .*incompatible function arguments"):
        cache(MODULES, **wrong)


def test_values_of_other_types_fail_in_calls_and_attributes():
    made = request(MODULES)
    with pytest.raises(TypeError, match=r"add_new_token\(\): token is 1.0, recorded is int"):
        made.add_new_token(1.0, 0)
    with pytest.raises(TypeError, match=r"draft_tokens is \['a'\]"):
        made.draft_tokens = ["a"]
    with pytest.raises(TypeError, match="sampling_config is 1"):
        request(MODULES, sampling_config=1)
    scheduler = MODULES["tensorrt_llm.bindings.internal.algorithms"].MicroBatchScheduler()
    with pytest.raises(TypeError, match="inflight_req_ids is set"):
        scheduler([made], set(), 1, 1)


def test_the_scheduler_passes_the_recorded_types(monkeypatch):
    """The KV cache manager of scheduler: trtllm constructs over stand-ins that check types."""
    fakes.install(monkeypatch)
    kv = TrtllmKVCacheManager(gate.load_bindings(), 8, 4, 2, 32)
    assert (kv.num_blocks, kv.num_free_blocks) == (8, 8)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=30))
def test_the_stand_ins_cache_holds_the_blocks_of_its_tokens(steps):
    kv = cache(MODULES, num_blocks=200)
    kv.add_sequence(0, 5, 1, None)
    num_tokens = 5
    for added, rewound in steps:
        for _ in range(added):
            kv.add_token(0)
        kv.rewind_kv_cache(0, rewound)
        num_tokens = max(0, num_tokens + added - rewound)
        blocks = kv.get_cache_block_ids(0, 64)[0]
        assert len(blocks) == len(set(blocks)) == -(-num_tokens // 4)
        assert kv.get_kv_cache_stats().free_num_blocks == 200 - len(blocks)
    kv.remove_sequence(0, None, False)
    assert kv.get_kv_cache_stats().free_num_blocks == 200


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("1.2", True),
        ("1.2.0", True),
        ("1.2.1", True),
        ("1.2.0.post1", True),
        ("1.2.1rc1", True),
        ("1.2.0rc8", False),
        ("1.2rc8", False),
        ("1.2.0.dev2025", False),
        ("1.1.9", False),
        ("1.3.0rc1", False),
        ("1.3.0", False),
        ("1.20.0", False),
        ("0.18.2", False),
        ("unknown", False),
    ],
)
def test_which_schedulers_are_accepted(version, accepted):
    assert gate.is_accepted(version) is accepted


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("1.2.0", True),
        ("1.2.1", True),
        ("1.2.0.post1", True),
        ("1.2.0rc8", False),
        ("1.3.0rc0", True),
        ("1.3.0rc29", True),
        ("1.3.0rc22+cu13", True),
        ("1.4.0rc1", True),
        ("1.4.0.dev2026", True),
        ("1.3.0", False),
        ("1.3.1rc1", False),
        ("1.4.0", False),
        ("1.5.0rc0", False),
        ("1.40.0rc1", False),
        ("2.0.0", False),
        ("unknown", False),
    ],
)
def test_which_drafters_are_known(version, known):
    assert gate.is_drafter_known(version) is known


def test_a_later_version_is_refused_with_what_it_removed(monkeypatch):
    fakes.install(monkeypatch, version="1.3.0rc22")
    with pytest.raises(
        ConfigError, match=r"^TensorRT-LLM 1\.3\.0rc22 is installed, accepted is .*1\.3 removed"
    ) as caught:
        gate.load_bindings()
    assert "install tensorrt-llm>=1.2,<1.3" in str(caught.value)
    fakes.install(monkeypatch, version="9.9")
    with pytest.raises(ConfigError, match=r"^TensorRT-LLM 9\.9 is installed, accepted is >=1\.2,<1\.3; install"):
        gate.load_bindings()


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("1.5.0rc0", "it: its classes are recorded up to 1.4.0rc; install"),
        ("1.4.0", "it: of 1.4, only candidates of 1.4.0 could be read; install"),
        ("1.3.1", "it: of 1.3, only candidates of 1.3.0 could be read; install"),
        ("1.2.0rc8", "candidates of 1.2.0; install"),
        ("1.1.0", "releases before 1.2; install"),
        ("0.21.0rc1", "releases before 1.2; install"),
    ],
)
def test_a_version_whose_drafter_is_not_known_is_refused_with_the_reason(monkeypatch, version, why):
    fakes.install(monkeypatch, version=version)
    with pytest.raises(ConfigError) as caught:
        gate.require_drafter()
    assert str(caught.value).startswith(
        f"TensorRT-LLM {version} is installed, and FaserDrafter is not written for {why}"
    )


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^the package tensorrt_llm is missing.*install tensorrt-llm>=1\.2,<1\.3"):
        gate.load_bindings()


def test_a_name_that_is_gone_is_one_sentence(monkeypatch):
    modules = fakes.install(monkeypatch)
    del modules["tensorrt_llm.bindings.internal.algorithms"].MicroBatchScheduler
    with pytest.raises(ConfigError, match=r"has no tensorrt_llm\.bindings\.internal\.algorithms\.MicroBatchScheduler"):
        gate.load_bindings()


def test_a_package_that_cannot_be_imported_here_is_one_sentence(monkeypatch):
    fakes.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings", None)
    with pytest.raises(ConfigError, match=r"tensorrt_llm\.bindings.* cannot be imported here \("):
        gate.load_bindings()


def test_the_gate_takes_only_what_the_api_surface_records(monkeypatch):
    fakes.install(monkeypatch)
    surface = load_entries("1.2")
    for module, names in gate._HOMES.items():
        assert all(f"{module}.{name}" in surface for name in names)
    assert gate.load_bindings().LlmRequest.__name__ == "LlmRequest"
