"""The recorded contract, the stand-ins generated from it, and the gate in front of the real package."""

import importlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import ConfigError
from faser_trtllm.trtllm import gate
from faser_trtllm.trtllm.contract import Symbol, load_contract, signature
from tests.trtllm import fakes

BATCH_MANAGER = "tensorrt_llm.bindings.internal.batch_manager"


def request(modules, **options):
    bindings = modules[BATCH_MANAGER]
    sampling = modules["tensorrt_llm.bindings"].SamplingConfig(1)
    arguments = {"request_id": 0, "max_new_tokens": 4, "input_tokens": [1, 2], "sampling_config": sampling}
    return bindings.LlmRequest(**arguments | {"is_streaming": False} | options)


def test_every_entry_says_where_it_comes_from_and_how_sure_it_is():
    contract = load_contract()
    assert len(contract) > 15
    for entry in contract.values():
        assert entry.confidence in ("1.2", "?")
        assert entry.kind in ("class", "enum", "function", "value")
        for arguments in entry.callables.values():
            signature(arguments)


def test_arguments_in_the_contracts_spelling():
    parsed = signature(["a", "b?", "/", "c=None", "d='x'", "e=LlmRequestState.CONTEXT_INIT", "*", "f=1", "**g"])
    assert str(parsed.replace(parameters=[p.replace(default=p.empty) for p in parsed.parameters.values()])) == (
        "(a, b, /, c, d, e, *, f, **g)"
    )
    assert parsed.parameters["e"].default == Symbol("LlmRequestState.CONTEXT_INIT")
    assert [parsed.parameters[name].default for name in "cdf"] == [None, "x", 1]


def test_a_call_that_the_contract_does_not_know_fails():
    modules = fakes.build()
    request(modules, end_id=3)
    with pytest.raises(TypeError, match="eos_id"):
        request(modules, eos_id=3)
    with pytest.raises(TypeError, match="request_id"):
        cache(modules).add_token(request_id=0)
    with pytest.raises(TypeError, match="missing a required argument"):
        cache(modules).remove_sequence(0, None)


def test_attributes_that_the_contract_does_not_know_fail():
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


def cache(modules, num_blocks=4, tokens_per_block=4):
    return modules[BATCH_MANAGER].KVCacheManager(
        [1],
        [8],
        tokens_per_block,
        {64: (num_blocks, 0)},
        4,
        1,
        [64],
        None,
        modules["tensorrt_llm.bindings"].DataType.HALF,
        0,
        0,
        64,
    )


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=30))
def test_the_stand_ins_cache_holds_the_blocks_of_its_tokens(steps):
    kv = cache(MODULES, num_blocks=200, tokens_per_block=4)
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


MODULES = fakes.build()


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
def test_which_versions_are_accepted(version, accepted):
    assert gate.is_accepted(version) is accepted


def test_another_version_is_refused_before_anything_is_used(monkeypatch):
    fakes.install(monkeypatch, version="1.3.0")
    with pytest.raises(ConfigError, match=r"^TensorRT-LLM 1\.3\.0 is installed, accepted is >=1\.2,<1\.3; install"):
        gate.load_bindings()


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


def test_the_gate_takes_only_what_the_contract_records(monkeypatch):
    fakes.install(monkeypatch)
    contract = load_contract()
    for module, names in gate._HOMES.items():
        assert all(f"{module}.{name}" in contract for name in names)
    assert gate.load_bindings().LlmRequest.__name__ == "LlmRequest"
