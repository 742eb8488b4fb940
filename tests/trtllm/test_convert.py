"""A TensorRT-LLM configuration becomes ours: by example, and for any mapping without an exception or a lost key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.config import ContextChunkingPolicy, SchedulerKind, ServiceConfig, load_service_config, parse
from faser_trtllm.errors import ConfigError
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.trtllm.convert.convert import convert, is_trtllm, read_config
from faser_trtllm.trtllm.convert.rules import BUILD, KV_CACHE, LLM_API, SCHEDULER
from faser_trtllm.trtllm.convert.speculation import FIELDS
from faser_trtllm.trtllm.convert.verdict import Outcome, join

DRAFT = {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "draft"}
LLM_YAML = """
model: llama
backend: pytorch
max_batch_size: 64
max_num_tokens: 4096
kv_cache_config: {enable_block_reuse: false, free_gpu_memory_fraction: 0.85, tokens_per_block: 32}
scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION, context_chunking_policy: FIRST_COME_FIRST_SERVED}
speculative_config: {decoding_type: DraftTarget, max_draft_len: 4, speculative_model_dir: draft, acceptance_window: 10}
enable_chunked_prefill: false
cuda_graph_config: {enable_padding: true}
env_overrides: {TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS: "2.5", OTHER: 1}
max_beam_width: 1
enable_lora: false
max_seq_len:
"""


def test_a_configuration_of_the_llm_api_becomes_ours() -> None:
    conversion = convert(yaml.safe_load(LLM_YAML))
    assert conversion.source == "llm_api"
    assert not conversion.refusals
    assert conversion.serve == {
        "max_batch_size": 64,
        "max_num_tokens": 4096,
        "max_draft_len": 4,
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.85},
        "scheduler_config": {
            "capacity_scheduler_policy": "MAX_UTILIZATION",
            "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
            "enable_chunked_context": False,
        },
        "synthetic_acceptance": 2.5,
    }
    assert conversion.build == {
        "checkpoint_dir": "llama",
        "draft_checkpoint_dir": "draft",
        "max_batch_size": 64,
        "max_num_tokens": 4096,
        "max_draft_len": 4,
        "tokens_per_block": 32,
    }
    text = conversion.as_text()
    assert "free_gpu_memory_fraction: 0.85 (serve); on a GPU; on a CPU the KV cache is sized in tokens" in text
    assert "max_batch_size: 64  -> max_batch_size: 64 (serve and build)" in text
    assert "max_seq_len: None  ignored, because it is not set" in text


def test_chunks_by_equal_progress_ask_for_the_scheduler_that_has_them() -> None:
    conversion = convert({"model": "x", "scheduler_config": {"context_chunking_policy": "EQUAL_PROGRESS"}})
    assert conversion.serve == {
        "scheduler": "trtllm",
        "scheduler_config": {"context_chunking_policy": "EQUAL_PROGRESS"},
    }
    config = parse(ServiceConfig, conversion.serve)
    assert config.scheduler is SchedulerKind.TRTLLM
    assert config.scheduler_config.context_chunking_policy is ContextChunkingPolicy.EQUAL_PROGRESS
    line = conversion.as_text().splitlines()[1]
    assert "-> scheduler_config.context_chunking_policy: EQUAL_PROGRESS (serve), scheduler: trtllm (serve); " in line


def test_trtllm_builds_default_of_no_drafts_does_not_turn_them_off() -> None:
    conversion = convert({"build_config": {"max_draft_len": 0}, "pretrained_config": {}})
    assert not conversion.refusals
    assert "max_draft_len" not in conversion.build
    assert not convert({"build_config": {"max_draft_len": 0}, "speculative_config": DRAFT, "model": "llama"}).refusals


def test_an_engines_config_json_becomes_build_options() -> None:
    conversion = convert(
        {
            "version": "1.2.0",
            "pretrained_config": {
                "architecture": "LlamaForCausalLM",
                "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
                "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
            },
            "build_config": {
                "max_batch_size": 8,
                "max_beam_width": 1,
                "max_draft_len": 5,
                "speculative_decoding_mode": 2,
                "kv_cache_type": "PAGED",
                "lora_config": {"lora_dir": [], "max_lora_rank": 64},
                "plugin_config": {
                    "tokens_per_block": 64,
                    "gemm_plugin": "auto",
                    "paged_kv_cache": True,
                    "nccl_plugin": None,
                },
            },
        }
    )
    assert conversion.source == "engine_config"
    assert not conversion.refusals
    assert conversion.build == {"max_batch_size": 8, "max_draft_len": 5, "tokens_per_block": 64}


def test_fp8_becomes_an_option_of_the_build_and_a_key_of_the_server() -> None:
    conversion = convert({"quant_config": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": None}})
    assert not conversion.refusals
    assert conversion.build == {"quantization": "FP8"}
    assert conversion.serve == {"kv_cache_config": {"dtype": "fp8"}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"max_beam_width": 4}, "beam search is not supported"),
        ({"enable_lora": True}, "LoRA is not supported"),
        ({"lora_config": {"lora_dir": ["x"]}}, "LoRA is not supported"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; the GPUs of a model are counted by faser build"),
        (
            {"quant_config": {"quant_algo": "W4A16_AWQ"}},
            "quant_config.quant_algo is W4A16_AWQ; only FP8 is converted",
        ),
        (
            {"pretrained_config": {"quantization": {"kv_cache_quant_algo": "INT8"}}},
            "pretrained_config.quantization.kv_cache_quant_algo is INT8; only FP8 is converted",
        ),
        ({"mm_encoder_only": True}, "mm_encoder_only is true; multimodal models are not served; leave it out"),
        (
            {"scheduler_config": {"waiting_queue_policy": "lifo"}},
            "is lifo; the queue is first come, first served within",
        ),
        ({"force_dynamic_quantization": True}, "scales of activations in fp8 are static"),
        ({"pretrained_config": {"mapping": {"tp_size": 8}}}, "pretrained_config.mapping.tp_size is 8"),
        ({"kv_cache_config": {"dtype": "nvfp4"}}, "the KV cache has the engine's type or fp8"),
        ({"scheduler_config": {"capacity_scheduler_policy": "STATIC_BATCH"}}, "one of GUARANTEED_NO_EVICT, MAX_UTIL"),
        ({"scheduler_config": {"context_chunking_policy": "LONGEST"}}, "one of FIRST_COME_FIRST_SERVED, EQUAL_PROG"),
        ({"scheduler_config": 3}, "it must be a mapping"),
        ({"max_batch_size": "many"}, "max_batch_size is many; it must be a whole number of at least 1"),
        ({"max_batch_size": True, "model": "x"}, "max_batch_size is true"),
        ({"guided_decoding_backnd": "xgrammar"}, "did you mean guided_decoding_backend?"),
        ({"kv_cache_config": {"free_gpu_mem_fraction": 0.9}}, "did you mean free_gpu_memory_fraction?"),
        ({"max_batch_size": 2, "build_config": {"max_batch_size": 3}}, "but max_batch_size says 2; keep one"),
        *[
            (
                {"env_overrides": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": value}},
                "it must be a number of at least 0",
            )
            for value in ("x", True, 10**400)
        ],
        ({"speculative_config": {**DRAFT, "max_total_draft_tokens": 9}}, "drafts are a chain here"),
        ({"speculative_config": {"decoding_type": "Draft_Target"}}, "max_draft_len is missing"),
        ({"speculative_config": {"max_draft_len": 3}}, "decoding_type is missing"),
        ({"speculative_config": {**DRAFT, "max_draft_length": 9}}, "did you mean max_draft_len?"),
        ({"build_config": {"speculative_decoding_mode": "MEDUSA"}}, "only draft_tokens_external is supported"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(data: dict[str, Any], says: str) -> None:
    refusals = convert(data).refusals
    assert len(refusals) == 1, refusals
    assert says in refusals[0]
    assert "\n" not in refusals[0]


@pytest.mark.parametrize(
    "kind", ["Lookahead", "PARD", "P_EAGLE", "Domino", "LiLiCorr", "AUTO", "User_Provided", "SaveState"]
)
def test_other_kinds_of_speculation_are_refused_by_name(kind: str) -> None:
    conversion = convert({"speculative_config": {"decoding_type": kind, "max_draft_len": 3, "num_eagle_layers": 1}})
    (sentence,) = conversion.refusals
    assert f"speculative_config.decoding_type is {kind}; " in sentence
    assert "Draft_Target" in sentence
    assert not conversion.serve


@pytest.mark.parametrize("kind", ["NGram", "ngram", "SA"])
def test_drafts_of_the_text_become_the_suffix_automaton(kind: str) -> None:
    section = {"decoding_type": kind, "max_draft_len": 3, "max_matching_ngram_size": 2, "is_keep_all": True}
    conversion = convert({"speculative_config": section})
    assert not conversion.refusals
    assert conversion.serve == {"drafters": ["suffix"], "max_draft_len": 3}
    assert conversion.build == {"max_draft_len": 3}
    assert "of whatever length" in conversion.as_text()


def test_keys_of_n_grams_are_unknown_to_a_draft_model() -> None:
    (sentence,) = _speculation(max_matching_ngram_size=2).refusals
    assert "max_matching_ngram_size" in sentence


@pytest.mark.parametrize("kind", ["Eagle", "Eagle3", "eagle3"])
def test_an_eagle3_head_is_the_draft_checkpoint(kind: str) -> None:
    section = {"decoding_type": kind, "max_draft_len": 3, "speculative_model": "head", "eagle3_one_model": True}
    section |= {"eagle3_layers_to_capture": [28, 1, 15], "eagle3_model_arch": "llama3", "use_dynamic_tree": False}
    conversion = convert({"speculative_config": section})
    assert not conversion.refusals
    assert conversion.serve == {"max_draft_len": 3}
    # the layers whose rows leave; by default TensorRT-LLM takes 1, n/2 - 1 and n - 4, which is our 2, n/2 and n - 3
    assert conversion.build == {"draft_checkpoint_dir": "head", "max_draft_len": 3, "eagle3_layers": [2, 16, 29]}


def test_a_head_beside_the_suffix_automaton_has_both_draft() -> None:
    section = {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "head",
        "sa_config": {"threshold": 4},
    }
    conversion = convert({"speculative_config": section})
    assert not conversion.refusals
    assert conversion.serve == {"max_draft_len": 3, "drafters": ["suffix", "model"]}


@pytest.mark.parametrize("length", ["max_draft_len", "num_nextn_predict_layers"])
def test_an_mtp_layer_is_the_targets_own(length: str) -> None:
    section = {"decoding_type": "MTP", length: 3, "relaxed_topk": 2, "use_relaxed_acceptance_for_thinking": False}
    conversion = convert({"speculative_config": section})
    assert not conversion.refusals
    assert conversion.build == {"mtp": True, "max_draft_len": 3}
    assert conversion.serve == {"max_draft_len": 3}


def test_an_mtp_layer_drafts_one_token_unless_told_otherwise() -> None:
    conversion = convert({"speculative_config": {"decoding_type": "MTP"}})
    assert (conversion.build, conversion.serve) == ({"mtp": True, "max_draft_len": 1}, {"max_draft_len": 1})


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"use_relaxed_acceptance_for_thinking": True}, "relaxed acceptance changes the text's distribution"),
        ({"num_nextn_predict_layers": 2}, "is 2 and max_draft_len 3, but both say how many tokens are drafted"),
        ({"speculative_model": "x"}, "the MTP layer is read from the target's checkpoint; leave it out"),
        ({"num_eagle_layers": 1}, "is not a key of TensorRT-LLM"),
    ],
)
def test_what_an_mtp_layer_cannot_do_is_refused(field: dict[str, Any], says: str) -> None:
    (sentence,) = convert({"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3} | field}).refusals
    assert says in sentence


BLOCK = {
    "max_draft_len": 7,
    "speculative_model": "drafter",
    "target_layer_ids": [33, 1, 17],
    "attention_backend": "FA4",
}


def test_a_dflash_drafter_is_the_draft_checkpoint() -> None:
    section = {
        "decoding_type": "DFlash",
        "mask_token_id": 9,
        "context_recompute_tail": 0,
        "spec_dec_variant": 2,
    } | BLOCK
    conversion = convert({"speculative_config": section})
    assert not conversion.refusals
    assert conversion.serve == {"max_draft_len": 7}
    # z-lab's ids name the layers that rows leave
    assert conversion.build == {"draft_checkpoint_dir": "drafter", "max_draft_len": 7, "eagle3_layers": [2, 18, 34]}


def test_a_dspark_drafter_is_the_draft_checkpoint() -> None:
    section = {"decoding_type": "DSpark", "block_size": 7, "markov_rank": 256, "markov_head_type": "vanilla"} | BLOCK
    section |= {"enable_confidence_scheduling": True, "confidence_min_predicted_gain": 0.04}
    conversion = convert({"speculative_config": section})
    assert not conversion.refusals
    assert conversion.build == {"draft_checkpoint_dir": "drafter", "max_draft_len": 7, "eagle3_layers": [2, 18, 34]}


@pytest.mark.parametrize(("shifted", "slots"), [(True, "anchor"), (False, "mask")])
def test_shifted_labels_say_which_row_drafts_first(shifted: bool, slots: str) -> None:
    section = {"decoding_type": "DFlash", "max_draft_len": 7, "shift_label": shifted}
    assert convert({"speculative_config": section}).build["block_slots"] == slots


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type is rnn; only DSpark's vanilla Markov head is supported"),
        ({"target_layer_ids": [-1, 3]}, "it must list layers from 0 on"),
        ({"shift_label": 1}, "shift_label is 1; it must be true or false"),
        ({"speculative_model_subfolder": "draft"}, "name that folder in speculative_model"),
        ({"sa_config": {"threshold": 4}}, "is not a key of TensorRT-LLM"),
    ],
)
def test_what_a_block_drafter_cannot_do_is_refused(field: dict[str, Any], says: str) -> None:
    (sentence,) = convert({"speculative_config": {"decoding_type": "DSpark", "max_draft_len": 7} | field}).refusals
    assert says in sentence


def test_a_limit_of_requests_with_medusa_heads_counts_the_chain() -> None:
    section = {"decoding_type": "Medusa", "speculative_model": "heads", "max_draft_len": 63}
    limited = convert({"speculative_config": section | {"max_concurrency": 8, "num_medusa_heads": 4}})
    assert not limited.refusals
    assert limited.serve == {"speculation": "schedule:1=4,9=0"}
    (sentence,) = convert({"speculative_config": section | {"max_concurrency": 8}}).refusals
    assert "speculative_config.max_concurrency needs speculative_config.num_medusa_heads" in sentence
    scheduled = section | {"draft_len_schedule": {1: 63, 4: 0}, "num_medusa_heads": 4}
    (sentence,) = convert({"speculative_config": scheduled}).refusals
    assert (
        "draft_len_schedule counts drafts of a tree, but a chain has one draft of each head; leave it out" in sentence
    )


def test_vllms_spelling_is_refused_with_tensorrt_llms() -> None:
    section = {"method": "dflash", "model": "drafter", "num_speculative_tokens": 15}
    (sentence,) = convert({"speculative_config": section}).refusals
    assert (
        "decoding_type is missing, and method (dflash) is vLLM's; write decoding_type, speculative_model and"
        in sentence
    )


@pytest.mark.parametrize("tree", [{"max_draft_len": 63}, {}])
def test_medusa_heads_draft_a_chain_of_their_number(tree: dict[str, Any]) -> None:
    section = {"decoding_type": "Medusa", "speculative_model": "heads", "num_medusa_heads": 4} | tree
    conversion = convert({"speculative_config": section | {"medusa_choices": [[0], [0, 0], [1]]}})
    assert not conversion.refusals
    assert conversion.serve == {}
    assert conversion.build == {"draft_checkpoint_dir": "heads"}
    assert "one chain is drafted and no tree" in conversion.as_text()


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"eagle3_layers_to_capture": [-1]}, "it must list layers from 0 on"),
        ({"eagle3_layers_to_capture": 3}, "it must list layers from 0 on"),
        ({"eagle3_layers_to_capture": [1, "a", None]}, "it must list layers from 0 on"),
        ({"draft_len_schedule": {"1" * 5000: 2}}, "draft_len_schedule is"),
        ({"eagle3_model_arch": "mistral_large3"}, "one of the Llama family"),
        ({"posterior_threshold": 0.1}, "changes the text's distribution"),
        ({"spec_dec_variant": 1}, "only EAGLE-3 heads"),
        ({"medusa_choices": [[0]]}, "is not a key of TensorRT-LLM"),
    ],
)
def test_what_an_eagle3_head_cannot_do_is_refused(field: dict[str, Any], says: str) -> None:
    section = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "head"}
    (sentence,) = convert({"speculative_config": section | field}).refusals
    assert says in sentence


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    (sentence,) = convert({"speculative_config": {"decoding_type": "Eagle4"}}).refusals
    assert "is Eagle4, which is unknown; did you mean Eagle" in sentence


def _speculation(**fields: Any) -> Any:
    return convert({"speculative_config": {**DRAFT, **fields}})


def test_a_schedule_counts_from_its_keys_on_and_says_so() -> None:
    conversion = _speculation(draft_len_schedule={1: 4, 8: 0, 4: 2})
    assert conversion.serve["speculation"] == "schedule:1=4,4=2,8=0"
    assert "batch sizes 1 to 3 draft 4, 4 to 7 draft 2, 8 and more draft 0" in conversion.as_text()
    assert _speculation(draft_len_schedule={"1": 4, "8": 0}).serve["speculation"] == "schedule:1=4,8=0"  # of JSON
    assert _speculation(max_concurrency=8).serve["speculation"] == "schedule:1=4,9=0"
    both = _speculation(max_concurrency=5, draft_len_schedule={1: 4, 4: 2, 8: 1})
    assert both.serve["speculation"] == "schedule:1=4,4=2,6=0"


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ({1: 3}, "gives batch size 1 the length 3; release 1.2 requires max_draft_len (4)"),
        (
            {1: 4, 2: 5},
            "has the length 5; it must be at most max_draft_len (4); lower the length or raise max_draft_len",
        ),
        ({0: 4}, "must map batch sizes from 1 on"),
        ({1: -1}, "must map batch sizes from 1 on"),
        ([4], "must map batch sizes from 1 on"),
        ({}, "must map batch sizes from 1 on"),
    ],
)
def test_a_schedule_that_1_2_would_refuse_is_refused(schedule: Any, says: str) -> None:
    (sentence,) = _speculation(draft_len_schedule=schedule).refusals
    assert says in sentence


@given(st.dictionaries(st.integers(2, 40), st.integers(0, 4), min_size=1, max_size=5))
def test_a_schedule_of_a_later_release_is_refused_with_the_same_lengths_in_the_form_of_1_2(
    later: dict[int, int],
) -> None:
    """There the keys are upper bounds, and nothing is drafted above the last."""
    (sentence,) = _speculation(draft_len_schedule=later).refusals
    fixed = yaml.safe_load(sentence.rpartition("write ")[2])
    policy = make_policy("schedule:" + ",".join(f"{size}={length}" for size, length in fixed.items()), 4)
    for n in range(1, 45):
        wanted = next((later[size] for size in sorted(later) if n <= size), 0)
        assert policy.plan(_view(n)).lengths == [wanted] * n


def _view(n: int) -> Any:
    from faser_trtllm.policy.base import StepView
    from tests.policy.world import request

    return StepView([request(str(i), slot=i) for i in range(n)], 0, 0, 0.0)


SCALARS = st.none() | st.booleans() | st.integers(-3, 9000) | st.floats() | st.text(max_size=8) | st.dates()
VALUES = st.recursive(
    SCALARS | st.sampled_from(["auto", "bfloat16", "MAX_UTILIZATION", "Draft_Target", "fcfs"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=4,
)


def _keys(names: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(sorted(names)) | st.text(max_size=5) | st.integers()


def _section(names: Any) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(_keys(names), VALUES, max_size=6)


SPECULATIVE = st.sampled_from([{}, DRAFT]) | st.builds(
    lambda kind, length: {"decoding_type": kind, "max_draft_len": length},
    st.sampled_from(["Eagle3", "Medusa", "MTP", "NGram", "DFlash", "DSpark", "PARD", "SA"]),
    st.integers(0, 8),
)
CONFIGS = st.builds(
    lambda top, sections: top | sections,
    _section([*LLM_API, *BUILD, "pretrained_config"]),
    st.fixed_dictionaries(
        {},
        optional={
            "kv_cache_config": _section(KV_CACHE),
            "scheduler_config": _section(SCHEDULER),
            "build_config": _section(BUILD),
            "speculative_config": st.builds(lambda a, b: a | b, SPECULATIVE, _section(FIELDS)),
        },
    ),
)


@given(CONFIGS)
def test_any_mapping_gets_a_verdict_per_key_and_what_is_not_refused_is_a_valid_configuration(
    data: dict[Any, Any],
) -> None:
    conversion = convert(data)
    for name in data:
        path = join("", name)
        assert any(v.key == path or v.key.startswith(f"{path}.") for v in conversion.verdicts), name
    report = json.loads(json.dumps(conversion.as_dict(), allow_nan=False))
    assert len(report["keys"]) == len(conversion.verdicts) == len(conversion.as_text().splitlines())
    assert report["refused"] == sum(entry["outcome"] == "refused" for entry in report["keys"])
    for verdict in conversion.verdicts:
        assert verdict.reason or verdict.outcome is Outcome.BECAME
        assert bool(verdict.serve or verdict.build) == (verdict.outcome is Outcome.BECAME)
    if not conversion.refusals:
        parse(ServiceConfig, dict(conversion.serve))


OURS = {
    "engine_dir": "x",
    "speculation": "off",
    "drain_timeout_s": 3.0,
    "max_batch_size": 4,
    "kv_cache_config": {"max_tokens": 64, "enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
    "scheduler_config": {"chunk_unit_size": 32},
    "otlp_traces_endpoint": "http://localhost:4318",
}


@given(st.sets(st.sampled_from(sorted(OURS))))
def test_our_own_configuration_is_read_as_before(names: set[str]) -> None:
    assert not is_trtllm({name: OURS[name] for name in names})


def test_which_configurations_are_tensorrt_llms(tmp_path: Path) -> None:
    for theirs in (
        {"model": "x"},
        {"speculative_config": {}},
        {"kv_cache_config": {"tokens_per_block": 32}},
        {"max_batch_size": 4, "speculative_confg": {}},
        {"version": "1", "pretrained_config": {}, "build_config": {}},
        {"max_input_len": 3, "plugin_config": {}},
    ):
        assert is_trtllm(theirs), theirs
    for ours in ({}, {"max_batch_size": 4}, {"max_bach_size": 4}, {"speculation": "off", "model": "x"}, {"xyz": 1}):
        assert not is_trtllm(ours), ours
    path = tmp_path / "faser.yaml"
    path.write_text(yaml.safe_dump(OURS))
    assert read_config(path) == (load_service_config(path), None)
    path.write_text("max_bach_size: 3")
    with pytest.raises(ConfigError, match=r"unknown configuration key max_bach_size; did you mean max_batch_size\?"):
        read_config(path)


def test_settings_go_before_the_files_and_keep_its_sections(tmp_path: Path) -> None:
    path = tmp_path / "trtllm.yaml"
    path.write_text(LLM_YAML.replace("env_overrides", "#"))
    config, conversion = read_config(
        path, {"max_batch_size": 2, "scheduler_config": {"enable_chunked_context": True}, "speculation": None}
    )
    assert conversion is not None
    assert config.max_batch_size == 2
    assert config.scheduler_config.enable_chunked_context
    assert config.scheduler_config.capacity_scheduler_policy.value == "MAX_UTILIZATION"
    path.write_text("max_beam_width: 4\nmax_lora: 3\nenable_lora: true")
    with pytest.raises(ConfigError, match=r"^max_beam_width is 4; beam search .* \(2 more keys are refused\)$"):
        read_config(path)


@pytest.mark.parametrize("text", ["- a", "a: [", "a: &x [*x]\nmodel: &y {b: *y}", "\x00", "? {1: 2}\n: 3"])
def test_files_that_hold_no_configuration_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trtllm.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert "\n" not in str(error.value)
