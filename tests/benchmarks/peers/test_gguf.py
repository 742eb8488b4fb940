"""The GGUF file holds the checkpoint's weights, in llama.cpp's order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.gguf import quantize_q8_0, write_gguf
from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_checkpoint
from tests.support.moe_checkpoints import make_moe_checkpoint

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata, and tensors, by llama.cpp's own reader."""
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor: Any) -> np.ndarray:
    """fp32, dequantized."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)


def write(checkpoint: Path, dtype: str) -> Path:
    path = checkpoint.parent / f"{dtype}.gguf"
    with CheckpointWeights(checkpoint) as weights:
        write_gguf(path, load_model_config(checkpoint), weights, dtype)
    return path


def test_bf16_round_trip(checkpoint: Path) -> None:
    metadata, tensors = read_gguf(write(checkpoint, "bf16"))
    config = load_model_config(checkpoint)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.attention.key_length"] == 32
    assert metadata["llama.rope.freq_base"] == config.rope.theta
    weights = CheckpointWeights(checkpoint)

    def wanted(name: str) -> np.ndarray:
        return weights.float32(name, weights.shape(name))

    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    }
    for name, source in same.items():
        np.testing.assert_array_equal(values(tensors[name]), wanted(source))
    assert len(tensors) == 3 + 9 * 2


@pytest.mark.parametrize(("name", "source", "num_heads"), [("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)])
def test_rotated_halves_become_neighbors(checkpoint: Path, name: str, source: str, num_heads: int) -> None:
    _, tensors = read_gguf(write(checkpoint, "bf16"))
    weights = CheckpointWeights(checkpoint)
    source = f"model.layers.0.self_attn.{source}.weight"
    theirs = weights.float32(source, weights.shape(source))
    ours = values(tensors[f"blk.0.{name}.weight"])
    for head in range(num_heads):
        for i in range(16):
            np.testing.assert_array_equal(ours[32 * head + 2 * i], theirs[32 * head + i])
            np.testing.assert_array_equal(ours[32 * head + 2 * i + 1], theirs[32 * head + 16 + i])


def test_tied_output_is_not_written_twice(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", tie=True)
    _, tensors = read_gguf(write(checkpoint, "bf16"))
    assert "output.weight" not in tensors


def test_q8_0_is_close_and_norms_are_exact(checkpoint: Path) -> None:
    exact = read_gguf(write(checkpoint, "bf16"))[1]
    rounded = read_gguf(write(checkpoint, "q8_0"))[1]
    assert rounded["blk.0.attn_q.weight"].tensor_type == KINDS.Q8_0
    for name, tensor in rounded.items():
        wanted = values(exact[name])
        if tensor.tensor_type == KINDS.F32:
            np.testing.assert_array_equal(values(tensor), wanted)
            continue
        # half a step, and fp16's own rounding of the scale
        limit = np.abs(wanted).reshape(-1, 32).max(axis=1, keepdims=True) / 127 * 0.57
        error = np.abs(values(tensor) - wanted).reshape(-1, 32)
        assert (error <= limit).all()
        assert error.max() > 0
        assert gguf.quantize(wanted, tensor.tensor_type).tobytes() == tensor.data.tobytes()


def test_q8_0_of_zeros_and_of_halves() -> None:
    assert not quantize_q8_0(np.zeros((2, 32), np.float32)).any()
    # The scale is 1, so 0.5 and -0.5 round away from zero as ggml's roundf has it.
    values = np.array([[127.0, 0.5, -0.5, 1.5, -126.4] + [0.0] * 27], np.float32)
    assert quantize_q8_0(values)[0, 0, 2:7].view(np.int8).tolist() == [127, 1, -1, 2, -126]


def test_enlarged_form(checkpoint: Path) -> None:
    path = checkpoint.parent / "large.gguf"
    with CheckpointWeights(checkpoint) as weights:
        config = expand_config(load_model_config(checkpoint), 3)
        write_gguf(path, config, ExpandedWeights(weights, 3), "bf16")
    metadata, tensors = read_gguf(path)
    assert metadata["llama.block_count"] == 6
    assert not values(tensors["blk.1.ffn_down.weight"]).any()
    assert values(tensors["blk.3.ffn_down.weight"]).any()


def test_a_mixture(tmp_path: Path) -> None:
    """Experts are one tensor of each kind, queries and keys as they are, the router exact."""
    checkpoint = make_moe_checkpoint(tmp_path / "model", num_layers=2, num_experts=4, head_dim=32)
    metadata, tensors = read_gguf(write(checkpoint, "bf16"))
    assert metadata["general.architecture"] == "qwen3moe"
    assert [metadata[f"qwen3moe.expert_{key}"] for key in ("count", "used_count", "feed_forward_length")] == [4, 2, 64]
    weights = CheckpointWeights(checkpoint)

    def wanted(name: str) -> np.ndarray:
        name = f"model.layers.1.{name}.weight"
        return weights.float32(name, weights.shape(name))

    same = {"attn_q": "self_attn.q_proj", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate"}
    for name, source in same.items():
        np.testing.assert_array_equal(values(tensors[f"blk.1.{name}.weight"]), wanted(source))
    for part in ("gate", "up", "down"):
        experts = np.stack([wanted(f"mlp.experts.{i}.{part}_proj") for i in range(4)])
        np.testing.assert_array_equal(values(tensors[f"blk.1.ffn_{part}_exps.weight"]), experts)
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type == KINDS.F32
    assert len(tensors) == 3 + 12 * 2
    unnormalized = replace(load_model_config(checkpoint).experts, norm_topk=False)
    with pytest.raises(CheckpointError, match="norm_topk_prob is false"):
        write_gguf(tmp_path / "x", replace(load_model_config(checkpoint), experts=unnormalized), weights, "bf16")


def test_what_llamacpp_would_misread_is_refused(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    with CheckpointWeights(checkpoint) as weights:
        for wrong in (
            replace(config, architecture="Qwen3ForCausalLM"),
            replace(config, qkv_bias=True),
            replace(config, rope=replace(config.rope, rope_type="yarn")),
        ):
            with pytest.raises(CheckpointError):
                write_gguf(checkpoint.parent / "x.gguf", wrong, weights, "bf16")
