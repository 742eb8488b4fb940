"""GGUF files of mixtures against the folders that they were made of, and how little of a file an expert reads."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from faser_trtllm.errors import CheckpointError
from tests.models.gguf.opened import opened
from tests.support.published_mixtures import pack_experts, publish, write_mixture

Q8_0 = gguf.GGMLQuantizationType.Q8_0
FAMILIES = ("qwen3", "qwen2", "olmoe", "mixtral", "gpt_oss")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 131_072}  # the length of gpt-oss's rope


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_weights_are_those_of_the_folder(tmp_path: Path, family: str) -> None:
    publish(tmp_path / "folder", family, dtype="bfloat16", **SIZES)
    path = write_mixture(tmp_path / "x.gguf", tmp_path / "folder", family)
    check(tmp_path / "folder", path)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    pack_experts(folder, publish(folder, "gpt_oss", dtype="bfloat16", **SIZES))
    check(folder, write_mixture(tmp_path / "x.gguf", folder, "gpt_oss"))


def check(folder: Path, path: Path) -> None:
    with opened(folder) as theirs, opened(path) as ours:
        assert ours.checkpoint.config == theirs.checkpoint.config
        pairs = zip(ours.arrays(), theirs.arrays(), strict=True)
        for (name, values), (_, expected) in pairs:
            np.testing.assert_array_equal(values, expected, err_msg=name)


def test_a_quantized_expert_is_decoded_alone(tmp_path: Path) -> None:
    """Each expert is what it is as a matrix by itself, and memory holds one, not the tensor with all of them."""
    num_experts, inner, hidden = 64, 64, 256
    sizes: dict[str, Any] = {"num_experts": num_experts, "moe_intermediate_size": inner, "hidden_size": hidden}
    publish(tmp_path / "folder", "qwen3", num_hidden_layers=1, **sizes)
    path = write_mixture(tmp_path / "x.gguf", tmp_path / "folder", "qwen3", "Q8_0")
    with opened(path) as file, opened(tmp_path / "folder") as folder:
        assert file.checkpoint.stored_types == ("F32", "Q8_0")
        for i in (0, 17, num_experts - 1):
            name = f"model.layers.0.mlp.experts.{i}.up_proj.weight"
            tracemalloc.start()
            values = file.checkpoint.weights.float32(name, (inner, hidden))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            exact = folder.checkpoint.weights.float32(name, (inner, hidden))
            alone = gguf.dequantize(gguf.quantize(exact, Q8_0), Q8_0)
            np.testing.assert_array_equal(values, alone)
            assert (values != exact).any()
            assert peak < num_experts * values.nbytes / 4


@pytest.mark.parametrize(
    ("family", "keys", "sentence"),
    [
        ("qwen3", {"expert_count": None}, "qwen3moe.expert_count is missing"),
        (
            "qwen3",
            {"expert_count": 7},
            r"mlp\.gate\.weight has shape \[8, 64\], .* \[7, 64\]",
        ),
        ("qwen3", {"expert_used_count": 9}, "num_experts_per_tok is 9; it must be at most 8"),
        ("qwen3", {"expert_gating_func": 2}, r"qwen3moe\.expert_gating_func is 2, only 1 is supported"),
        ("qwen3", {"expert_weights_scale": 2.5}, r"qwen3moe\.expert_weights_scale is 2\.5, only 1\.0 is supported"),
        ("qwen3", {"leading_dense_block_count": 1}, r"leading_dense_block_count is 1, only 0 is supported"),
        ("qwen2", {"expert_shared_feed_forward_length": None}, "expert_shared_feed_forward_length is missing"),
        ("mixtral", {"expert_count": None}, r"tensor blk\.\d\.ffn_.* belongs to no LlamaForCausalLM"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, family: str, keys: dict[str, Any], sentence: str) -> None:
    publish(tmp_path / "folder", family, num_hidden_layers=1)
    path = write_mixture(tmp_path / "x.gguf", tmp_path / "folder", family, **keys)
    with pytest.raises(CheckpointError, match=sentence) as caught, opened(path):
        pass
    assert "\n" not in str(caught.value)
