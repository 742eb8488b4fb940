"""TensorRT-LLM's own configurations: every key of its examples and of its LLM API has a verdict with a reason.

example_keys.json has names of keys and our verdicts; the values here are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.trtllm.convert.convert import convert
from faser_trtllm.trtllm.convert.verdict import Outcome, Verdict

DATA = json.loads((Path(__file__).parent / "example_keys.json").read_text())
EXAMPLES: dict[str, dict[str, list[str]]] = DATA["examples"]

BECAME = {
    "dtype": "bfloat16",
    "enable_chunked_prefill": True,
    "free_gpu_memory_fraction": 0.8,
    "kv_cache_config.dtype": "fp8",
    "kv_cache_config.enable_block_reuse": True,
    "kv_cache_config.free_gpu_memory_fraction": 0.8,
    "kv_cache_free_gpu_memory_fraction": 0.8,
    "model": "engines/demo/target",
    "speculative_config.decoding_type": "MTP",
    "speculative_config.eagle3_layers_to_capture": [1],
    "speculative_config.speculative_model": "head",
    "tokenizer": "engines/demo/target",
}
IGNORED = {
    "kv_cache_config.dtype": "auto",
    "load_format": "auto",
    "skip_loading_weights": False,
    "speculative_config.decoding_type": "Draft_Target",
    "speculative_config.use_relaxed_acceptance_for_thinking": False,
    "speculative_config.use_sa_spec": False,
}
REFUSED = {
    "checkpoint_format": "Other",
}
"""Values that lead to a verdict; 16 where nothing is said, and 1 to be ignored."""


def configuration(verdicts: dict[str, list[str]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    values = {"became": (BECAME, 16), "ignored": (IGNORED, 1), "refused": (REFUSED, 16)}
    for outcome, keys in verdicts.items():
        known, default = values[outcome]
        for key in keys:
            section, _, name = key.rpartition(".")
            (data.setdefault(section, {}) if section else data)[name] = known.get(key, default)
    if any("eagle3" in key for keys in verdicts.values() for key in keys):
        data["speculative_config"]["decoding_type"] = "Eagle3"
    return data


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_recorded_verdicts(name: str) -> None:
    conversion = convert(configuration(EXAMPLES[name]))
    found: dict[str, set[str]] = {}
    for verdict in conversion.verdicts:
        found.setdefault(verdict.outcome.value, set()).add(verdict.key)
        assert verdict.reason or verdict.outcome is Outcome.BECAME, verdict.key
    assert found == {outcome: set(keys) for outcome, keys in EXAMPLES[name].items()}


def test_the_examples_are_of_every_kind() -> None:
    assert len(EXAMPLES) > 60
    assert sum("refused" not in verdicts for verdicts in EXAMPLES.values()) > 10
    assert {name.split("/")[0] for name in EXAMPLES} > {"auto_deploy", "configs", "disaggregated", "llm-api"}


def verdict_on(key: str, value: Any = 1) -> Verdict:
    """On one key in a configuration that has it alone, or beside what its section needs."""
    *sections, name = key.split(".")
    data: dict[str, Any] = {name: value}
    if sections == ["speculative_config"]:
        data = {"decoding_type": "Draft_Target", "max_draft_len": 4} | data
    for section in reversed(sections):
        data = {section: data}
    return next(verdict for verdict in convert(data).verdicts if verdict.key == key)


@pytest.mark.parametrize("key", DATA["llm_api"])
def test_every_key_of_the_llm_api_is_known(key: str) -> None:
    verdict = verdict_on(key)
    assert "is not a key of TensorRT-LLM" not in verdict.reason
    assert verdict.reason or verdict.outcome is Outcome.BECAME


IGNORED_KINDS = ("Draft_Target", "Eagle", "Eagle3", "DFlash", "DSpark")  # the checkpoint says it


@pytest.mark.parametrize("kind", DATA["decoding_types"])
def test_every_decoding_type_is_known_by_name(kind: str) -> None:
    verdict = verdict_on("speculative_config.decoding_type", kind)
    assert "unknown" not in verdict.reason
    assert (verdict.outcome is Outcome.IGNORED) == (kind in IGNORED_KINDS)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("PARD", "is PARD; it drafts all places in one pass over mask tokens; only Draft_Target"),
        ("Domino", "is Domino; a recurrent network (GRU) corrects its logits by earlier drafts; only"),
        ("DFlush", "is DFlush, which is unknown; did you mean DFlash?"),
    ],
)
def test_newer_methods_are_refused_by_name(kind: str, says: str) -> None:
    assert says in verdict_on("speculative_config.decoding_type", kind).reason


def test_attention_dp_on_one_device_changes_nothing() -> None:
    conversion = convert({"tensor_parallel_size": 1, "enable_attention_dp": True, "max_batch_size": 4})
    assert conversion.refusals == ()
    two = convert({"tensor_parallel_size": 2, "enable_attention_dp": True})
    assert [verdict.key for verdict in two.verdicts if verdict.outcome is Outcome.REFUSED] == ["tensor_parallel_size"]


def test_the_memory_fraction_of_nvidias_recipes_is_taken() -> None:
    conversion = convert({"kv_cache_free_gpu_memory_fraction": 0.8, "max_batch_size": 4})
    assert conversion.refusals == ()
    assert conversion.serve == {"max_batch_size": 4, "kv_cache_config": {"free_gpu_memory_fraction": 0.8}}
    twice = convert({"free_gpu_memory_fraction": 0.8, "kv_cache_config": {"free_gpu_memory_fraction": 0.9}})
    assert len(twice.refusals) == 1


@pytest.mark.parametrize(
    ("data", "meant"),
    [
        ({"kv_cache_config": {"kv_cache_dtype": "auto"}}, "kv_cache_config.dtype"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_config.dtype"),
        ({"kv_cache_config": {"kv_cache_free_gpu_memory_fraction": 1}}, "kv_cache_config.free_gpu_memory_fraction"),
        ({"enable_block_reuse": True, "backend": "pytorch"}, "kv_cache_config.enable_block_reuse"),
        ({"capacity_scheduler_policy": "X", "backend": "pytorch"}, "scheduler_config.capacity_scheduler_policy"),
        ({"decoding_type": "MTP"}, "speculative_config.decoding_type"),
        ({"max_batch_sise": 4, "backend": "pytorch"}, "max_batch_size"),
        ({"kv_cache_config": {"enable_blocks_reuse": True}}, "enable_block_reuse"),
    ],
)
def test_a_hint_names_the_section_that_a_key_belongs_to(data: dict[str, Any], meant: str) -> None:
    (refusal,) = convert(data).refusals
    assert refusal.endswith(f"is not a key of TensorRT-LLM; did you mean {meant}?")
