"""Mixtures of experts: configurations, and the plain reference against transformers on what transformers writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import load_model_config, parse_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.experts import ExpertsConfig
from faser_trtllm.models.reference import ReferenceModel, routes
from faser_trtllm.models.rope import RopeConfig
from tests.models.gguf.opened import opened
from tests.support.published_mixtures import GPT_OSS_ROPE, pack_experts, publish

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-not-normalized": ("qwen3", {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-normalized": ("qwen2", {"norm_topk_prob": True, "qkv_bias": False}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "olmoe-normalized": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": None, "attention_bias": True}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 9}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-yarn": ("gpt_oss", {"rope_parameters": GPT_OSS_ROPE, "swiglu_limit": 7.0}),
    "gpt_oss-other-layers": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "gpt_oss-no-biases": ("gpt_oss", {"attention_bias": False, "sliding_window": 128}),
    "mixtral-all-experts": ("mixtral", {"num_experts_per_tok": 8, "sliding_window": None}),
}
TOKENS = [(7 * i * i + 3) % 320 for i in range(40)]
NUM_GREEDY = 12


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    check(tmp_path, publish(tmp_path, family, **changes))


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    theirs = publish(tmp_path, "gpt_oss", dtype="bfloat16")
    pack_experts(tmp_path, theirs)
    check(tmp_path, theirs)


def check(directory: Path, theirs: Any) -> None:
    """The reference's logits are transformers' in fp32, and so is the text that it chooses."""
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
        texts = theirs.generate(
            torch.tensor([TOKENS]), max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    with opened(directory) as found:
        model = ReferenceModel(found.checkpoint.config, found.checkpoint.weights)
        logits = model.logits(TOKENS)
        text = list(TOKENS)
        for _ in range(NUM_GREEDY):
            text.append(int(model.logits(text)[-1].argmax()))
    assert expected.std() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert text == texts[0].tolist()


SOFTMAX = ExpertsConfig(6, 3, 8, "softmax", norm_topk=True)


def test_of_equal_scores_the_lowest_index_wins() -> None:
    logits = torch.tensor([[1.0] * 6, [0.0, 2.0, 0.0, 2.0, 0.0, 0.0], [3.0, 1.0, 1.0, 1.0, 1.0, 4.0]])
    for experts in (SOFTMAX, dataclasses.replace(SOFTMAX, scoring="top_k_softmax", norm_topk=False)):
        chosen, weights = routes(experts, logits)
        assert chosen.tolist() == [[0, 1, 2], [1, 3, 0], [5, 0, 1]]
        torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_weights_are_scores_normalized_or_not() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0, -2.0]])
    scores = logits.softmax(-1)[0, [2, 4, 0]]
    for norm_topk, expected in ((True, scores / scores.sum()), (False, scores)):
        chosen, weights = routes(dataclasses.replace(SOFTMAX, norm_topk=norm_topk), logits)
        assert chosen.tolist() == [[2, 4, 0]]
        torch.testing.assert_close(weights[0], expected)


def test_experts_run_in_ascending_order(tmp_path: Path) -> None:
    publish(tmp_path, "qwen3")
    seen: list[tuple[int, int]] = []

    class Watched(ReferenceModel):
        def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
            if ".experts." in name and name.endswith("down_proj"):
                seen.append((int(name.split(".")[2]), int(name.split(".")[5])))
            return super().linear(name, x)

    with opened(tmp_path) as found:
        Watched(found.checkpoint.config, found.checkpoint.weights).logits(TOKENS)
    assert seen == sorted(set(seen))
    assert len(seen) > 3 * 3


@pytest.mark.parametrize("family", ["qwen2", "olmoe", "mixtral", "gpt_oss"])
def test_expansion_preserves_the_function(tmp_path: Path, family: str) -> None:
    publish(tmp_path, family)
    with opened(tmp_path) as found:
        config, weights = found.checkpoint.config, found.checkpoint.weights
        deeper = expand_config(config, 2)
        before = ReferenceModel(config, weights).logits(TOKENS)
        after = ReferenceModel(deeper, ExpandedWeights(weights, 2)).logits(TOKENS)
    assert deeper.num_layers == 6
    assert torch.equal(before, after)


def mixture(family: str = "Qwen3Moe", **changes: Any) -> dict[str, Any]:
    sizes = dict.fromkeys(("Qwen3Moe", "Qwen2Moe"), ("num_experts", "moe_intermediate_size"))
    sizes["Olmoe"] = ("num_experts", "intermediate_size")
    count, width = sizes.get(family, ("num_local_experts", "intermediate_size"))
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 48,
        count: 8,
        width: 32,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_what_the_families_are() -> None:
    families = ("Qwen3Moe", "Qwen2Moe", "Olmoe", "Mixtral", "GptOss")
    of = {family: parse_model_config(mixture(family)) for family in families}
    plain = ExpertsConfig(8, 2, 32, "softmax", norm_topk=False)
    assert of["Qwen3Moe"].experts == plain  # transformers' default; the published files say true
    assert of["Qwen2Moe"].experts == dataclasses.replace(plain, shared_size=48)
    assert of["Olmoe"].experts == plain
    assert [family for family in families if of[family].norms_all_heads] == ["Olmoe"]
    assert of["Mixtral"].experts == dataclasses.replace(plain, norm_topk=True)
    assert of["GptOss"].experts == ExpertsConfig(8, 2, 32, "top_k_softmax", False, "clamped", has_bias=True)
    assert of["GptOss"].rope == RopeConfig("yarn", 150000.0, 32.0, 4096, truncate=False)
    assert (of["GptOss"].has_sinks, of["GptOss"].windows) == (True, (128, 0, 128, 0))
    assert parse_model_config(mixture("GptOss", sliding_window=None)).windows == (0,) * 4
    assert {config.intermediate_size for config in of.values()} == {32}
    traits = {family: (config.qk_norm, config.qkv_bias, config.o_bias) for family, config in of.items()}
    assert traits == {
        "Qwen3Moe": (True, False, False),
        "Qwen2Moe": (False, True, False),
        "Olmoe": (True, False, False),
        "Mixtral": (False, False, False),
        "GptOss": (False, True, True),
    }
    assert parse_model_config(mixture(norm_topk_prob=True)).experts == dataclasses.replace(plain, norm_topk=True)
    assert (of["Mixtral"].rope.theta, of["Mixtral"].rms_norm_eps) == (1e6, 1e-5)


def test_experts_in_an_engine_file_have_the_names_of_the_fields() -> None:
    assert SOFTMAX.sizes() == {
        "num_experts": 6,
        "top_k": 3,
        "intermediate_size": 8,
        "scoring": "softmax",
        "norm_topk": True,
        "activation": "silu",
        "has_bias": False,
        "shared_size": 0,
    }


def test_both_names_of_the_number_of_experts(tmp_path: Path) -> None:
    """Published files have num_experts, transformers 5 writes num_local_experts."""
    publish(tmp_path, "qwen3")
    data = json.loads((tmp_path / "config.json").read_text())
    assert "num_local_experts" in data
    old = {key: value for key, value in data.items() if key != "num_local_experts"} | {"num_experts": 8}
    assert parse_model_config(old) == load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Qwen3Moe", {"num_experts": ...}, "num_experts is missing"),
        ("Qwen3Moe", {"num_experts": 0}, "num_experts is 0; it must be an integer of at least 1"),
        ("Qwen3Moe", {"num_experts": 1 << 14}, "num_experts is 16384 in each of 4 layers, at most 32768 in all"),
        ("Qwen3Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most 8"),
        ("Qwen3Moe", {"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
        ("Qwen3Moe", {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0] in a Qwen3MoeForCausalLM, only [] is supported"),
        ("Qwen2Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2 in a Qwen2MoeForCausalLM, only 1 is"),
        ("Qwen3Moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it must be true or false"),
        ("Qwen2Moe", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size is missing"),
        ("Mixtral", {"num_local_experts": ...}, "num_local_experts is missing"),
        ("GptOss", {"swiglu_limit": 6.5}, "swiglu_limit is 6.5 in a GptOssForCausalLM, only 7.0 is supported"),
        ("GptOss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0 in a GptOssForCausalLM, only 1.702 is supported"),
        ("GptOss", {"layer_types": ["sliding_attention", "full_attention"]}, "for each of the 4 layers"),
        ("DeepseekV3", {}, "DeepseekV3ForCausalLM is not supported; its attention is latent (MLA)"),
        ("DeepseekV2", {}, "DeepseekV2ForCausalLM is not supported; its attention is latent (MLA)"),
        ("Qwen3Next", {}, "Qwen3NextForCausalLM is not supported; some of its layers keep a recurrent state"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, only null is supported"),
        (
            "Olmoe",
            {"head_dim": 10},
            "num_key_value_heads 4 times head_dim 10 is 40, the norm of all keys of a row needs",
        ),
    ],
)
def test_what_cannot_be_built_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: ") as caught:
        parse_model_config(mixture(family, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
