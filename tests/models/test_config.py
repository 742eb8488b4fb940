from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig, load_model_config, parse_model_config
from tests.support.checkpoints import LLAMA3_ROPE, make_checkpoint


def llama(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE | {"rope_theta": 500000.0}], ids=["default", "llama3"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_both_spellings_say_the_same(tmp_path: Path, architecture: str, rope: dict[str, Any] | None) -> None:
    old, new = (
        load_model_config(make_checkpoint(tmp_path / spelling, architecture, spelling=spelling, rope=rope))
        for spelling in ("v4", "v5")
    )
    assert old == new
    assert new.rope.theta == (500000.0 if rope else 10000.0)


def test_older_checkpoints_leave_much_out() -> None:
    config = parse_model_config(llama())
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 16, False)
    assert (config.rms_norm_eps, config.windows, config.eos_token_ids) == (1e-6, (0,) * 4, ())


def test_the_architectures_differ_in_biases_and_norms(tmp_path: Path) -> None:
    def traits(architecture: str, **options: Any) -> tuple[bool, ...]:
        config = load_model_config(make_checkpoint(tmp_path / architecture, architecture, **options))
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert traits("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert traits("mistral") == (False, False, False, False)
    assert traits("qwen2") == (True, False, False, False)
    assert traits("qwen3") == (False, False, False, True)
    assert traits("mimo", attention_bias=True) == (True, False, False, False)


def test_qwen3_has_its_own_default_head_dim() -> None:
    config = parse_model_config(llama(architectures=["Qwen3ForCausalLM"]))
    assert config.head_dim == 128


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"rope_type": "linear", "factor": 0.5}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}, 1600),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 1e30, "original_max_position_embeddings": 128}, 2**31 - 1),
        (LLAMA3_ROPE, 512),
        ({"rope_type": "default"}, 512),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_linear_and_yarn_scaling_raise_the_limit_of_tokens(rope: dict[str, Any], longest: int, key: str) -> None:
    """Qwen's recipe for long texts only adds rope_scaling, and vLLM serves what it allows."""
    config = parse_model_config(llama(**{key: rope}))
    assert config.max_position_embeddings == longest
    if config.rope.rope_type == "yarn":
        assert config.rope.original_max_position_embeddings == rope.get("original_max_position_embeddings", 512)


def windows(**changes: Any) -> tuple[int, ...]:
    config: ModelConfig = parse_model_config(llama(**changes))
    return config.windows


def test_sliding_windows_as_transformers_reads_them() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(**mistral) == (4096,) * 4
    assert windows(**mistral, sliding_window=None) == (0,) * 4
    assert windows(**mistral, sliding_window=128) == (128,) * 4
    assert windows(sliding_window=128) == (0,) * 4
    mixed = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen: dict[str, Any] = {"architectures": [architecture], "sliding_window": 128}
        assert windows(**qwen) == windows(**qwen, layer_types=mixed) == (0,) * 4
        qwen["use_sliding_window"] = True
        assert windows(**qwen) == (0,) * 4
        assert windows(**qwen, max_window_layers=0) == (128,) * 4
        assert windows(**qwen | {"sliding_window": None}, max_window_layers=0) == (0,) * 4
        assert windows(**qwen, max_window_layers=3) == (0, 0, 0, 128)
        assert windows(**qwen, max_window_layers=3, layer_types=mixed) == (0, 128, 128, 0)
        assert windows(**qwen, max_window_layers=0, layer_types=["full_attention"] * 4) == (0,) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported are Llama",
        ),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a number greater than 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not supported; supported are",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope: factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope: factor is 0"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            "rope_parameters differ by layer",
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings is 32, but another in the rope settings, of which",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types differ, and engines differ in"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "it must name full_attention or sliding_attention for",
        ),
        ({"layer_types": ["chunked_attention"] * 4}, "each of the 4 layers"),
        ({"layer_types": 5}, "layer_types is 5; it must name full_attention"),
        ({"layer_types": [["full_attention"]]}, "layer_types is [['full_attention']]; it must name"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 2**31},
            "sliding_window is 2147483648; it must be",
        ),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647; it must be at most 1000"),
        ({"vocab_size": 10**4000}, "vocab_size is 1000000"),
        ({"rope_theta": 10**400}, "rope_theta is 1000000"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; it must be a number greater than 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number greater than 0"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: ") as caught:
        parse_model_config(llama(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ('"\xff"', "not valid JSON"),
        ("[" * 200_000, "not valid JSON: it is nested deeper than"),
    ],
    ids=["none", "cut", "list", "bytes", "deep"],
)
def test_unreadable_files(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_eos_may_be_a_list(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, eos_token_id=[3, 5])
    assert load_model_config(directory).eos_token_ids == (3, 5)
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [3, 5]
