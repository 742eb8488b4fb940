"""An enlarged model says what the trained one says, to rounding, and is dense."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.models.enlarge import (
    SHAPES,
    DecoderShape,
    EnlargedWeights,
    enlarge_config,
    num_matrix_parameters,
    shape_named,
)
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights, check_shapes, expected_shapes
from tests.support.checkpoints import LLAMA3_ROPE, make_checkpoint

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(2, 300, 40))
# hidden, inner, layers, heads, KV heads, head size; the trained model has 64, 96, 2, 4, 2, 16.
LARGER = DecoderShape(160, 250, 5, 8, 4, 32)


def trained(directory: Path, **options: object) -> tuple[ModelConfig, CheckpointWeights]:
    make_checkpoint(directory, **options)  # type: ignore[arg-type]
    return load_model_config(directory), CheckpointWeights(directory)


def logits(config: ModelConfig, weights: object, **options: bool) -> torch.Tensor:
    return ReferenceModel(config, weights, **options).logits(TOKENS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [
        LARGER,
        DecoderShape(64, 96, 2, 4, 2, 16),  # nothing but the rotation
        DecoderShape(96, 97, 3, 12, 6, 16),  # neurons that do not pair up, copies that do not share out evenly
        DecoderShape(96, 128, 4, 5, 5, 48),  # groups of one, an odd number of KV heads, three times the head size
        DecoderShape(80, 192, 7, 6, 2, 16),  # a head more per group than the trained one has
    ],
    ids=lambda shape: "x".join(map(str, dataclasses.astuple(shape))),
)
@pytest.mark.parametrize("tie", [True, False])
def test_logits_are_those_of_the_trained_model(tmp_path: Path, shape: DecoderShape, tie: bool) -> None:
    config, weights = trained(tmp_path, tie=tie)
    larger = EnlargedWeights(weights, config, shape)
    check_shapes(larger, expected_shapes(larger.config))
    expected = logits(config, weights)
    torch.testing.assert_close(logits(larger.config, larger), expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "mistral", "sliding_window": 9},
        {"rope": {"rope_type": "linear", "factor": 3.0}},
        {"rope": LLAMA3_ROPE},
        {"rms_norm_eps": 0.3},  # an epsilon that is not scaled along would show
    ],
    ids=["sliding window", "linear rope", "llama3 rope", "large epsilon"],
)
def test_families_and_ropes(tmp_path: Path, options: dict[str, object]) -> None:
    config, weights = trained(tmp_path, **options)
    larger = EnlargedWeights(weights, config, LARGER)
    expected = logits(config, weights)
    torch.testing.assert_close(logits(larger.config, larger), expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_rounded_to_bf16_it_stays_close(tmp_path: Path) -> None:
    """The enlarged model that a GPU runs is a rounded one, as every bf16 model is."""
    config, weights = trained(tmp_path)
    larger = EnlargedWeights(weights, config, LARGER)
    expected, found = logits(config, weights), logits(larger.config, larger, round_to_bf16=True)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(
    "options", [{}, {"tie": False}, {"rms_norm_eps": 0.3}], ids=["tied", "untied", "large epsilon"]
)
def test_a_larger_vocabulary_says_nothing_else(tmp_path: Path, options: dict[str, object]) -> None:
    """Added tokens have logits of their own, far below the trained ones', which stay as they are."""
    config, weights = trained(tmp_path, **options)
    larger = EnlargedWeights(weights, config, dataclasses.replace(LARGER, vocab_size=2 * config.vocab_size + 5))
    check_shapes(larger, expected_shapes(larger.config))
    for rounded in (False, True):
        expected, found = logits(config, weights), logits(larger.config, larger, round_to_bf16=rounded)
        known, added = found[:, : config.vocab_size], found[:, config.vocab_size :]
        assert added.shape[1] == config.vocab_size + 5
        assert (known - expected).norm() < (0.02 if rounded else 1e-5) * expected.norm()
        gaps = known.max(1).values - added.max(1).values
        assert gaps.min() > 15
        assert gaps.max() < 80  # no probability is 0 in fp32, as in a trained model
        assert (found.softmax(1) > 0).all()


def test_no_layer_writes_to_the_added_tokens_dimension(tmp_path: Path) -> None:
    """In bf16 what it holds is exact, so it is the same on entering the LM head."""
    config, weights = trained(tmp_path)
    larger = EnlargedWeights(weights, config, dataclasses.replace(LARGER, vocab_size=config.vocab_size + 1))
    model = ReferenceModel(larger.config, larger, round_to_bf16=True)
    first, *_, last = (rows[:, -1] for rows in model.hidden_rows(TOKENS))
    assert (first > 0).all()
    assert torch.equal(first, last)
    assert torch.equal(first, first.bfloat16().float())


def test_matrices_are_dense_except_for_keys(tmp_path: Path) -> None:
    config, weights = trained(tmp_path)
    larger = EnlargedWeights(weights, config, LARGER)
    for name, shape in expected_shapes(larger.config).items():
        if len(shape) == 2 and "k_proj" not in name:
            assert np.count_nonzero(larger.float32(name, shape)) == np.prod(shape), name


def test_added_layers_add_nothing(tmp_path: Path) -> None:
    """Their parts alone are far from zero: the test would see a layer that does not cancel."""
    config, weights = trained(tmp_path)
    larger = EnlargedWeights(weights, config, LARGER)
    real = {0, 3}
    hidden = torch.randn(6, LARGER.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in set(range(LARGER.num_layers)) - real:
        gate, up, down = (
            torch.from_numpy(larger.float32(name, larger.shape(name)))
            for name in (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        )
        inner = torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)
        assert (inner @ down.T).abs().max() < 1e-6
        assert (inner[:, ::2] @ down.T[::2]).abs().max() > 0.1


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    config, weights = trained(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    first, second, other = (EnlargedWeights(weights, config, LARGER, seed).tensor(name) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_bf16_bits_are_the_rounded_tensor(tmp_path: Path) -> None:
    config, weights = trained(tmp_path)
    larger = EnlargedWeights(weights, config, LARGER)
    name = "model.layers.0.self_attn.o_proj.weight"
    bits = torch.from_numpy(larger.bfloat16(name, larger.shape(name)).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(bits, larger.tensor(name).bfloat16())


def test_known_shapes_have_the_parameters_of_their_names(tmp_path: Path) -> None:
    config, _ = trained(tmp_path, num_heads=1, num_kv_heads=1)
    wanted = {"0.1B": 0.1e9, "0.3B": 0.3e9, "1B": 1e9, "8B": 7e9, "32B": 31e9}
    for name, shape in SHAPES.items():
        size, _, vocabulary = name.partition("-")
        known = num_matrix_parameters(enlarge_config(config, shape.layers))
        assert known == pytest.approx(wanted[size], rel=0.2)
        added = num_matrix_parameters(enlarge_config(config, shape)) - known
        assert added == ((128_256 - config.vocab_size) * shape.hidden_size if vocabulary else 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, "hidden_size is 32; it must be at least the trained model's 64"),
        ({"num_layers": 1}, "num_layers is 1"),
        ({"head_dim": 24}, "head_dim is 24; it must be a multiple of the trained model's 16"),
        ({"num_heads": 9}, "num_heads is 9; it must be a multiple of num_kv_heads, 4"),
        ({"num_heads": 2, "num_kv_heads": 2}, "leaves 1 for the 2 query heads"),
        ({"vocab_size": 4}, "vocab_size is 4; it must be at least the trained model's"),
        ({"vocab_size": 9999, "hidden_size": 64}, "hidden_size is 64; it must be more than the trained model's"),
    ],
)
def test_shapes_that_cannot_hold_the_model_are_refused(tmp_path: Path, change: dict[str, int], words: str) -> None:
    config, _ = trained(tmp_path)
    with pytest.raises(InvalidArgumentError, match=words):
        enlarge_config(config, dataclasses.replace(LARGER, **change))


def test_models_with_biases_or_inner_norms_are_refused(tmp_path: Path) -> None:
    for architecture, words in (("qwen2", "qkv_bias is true"), ("qwen3", "qk_norm is true")):
        config, _ = trained(tmp_path / architecture, architecture=architecture)
        with pytest.raises(InvalidArgumentError, match=words):
            enlarge_config(config, LARGER)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config, _ = trained(tmp_path / "yarn", rope=yarn)
    with pytest.raises(InvalidArgumentError, match="rope_type is yarn"):
        enlarge_config(config, LARGER)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    config, weights = trained(tmp_path)
    larger = EnlargedWeights(weights, config, LARGER)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.5\.mlp"):
        larger.shape("model.layers.5.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match="has shape"):
        larger.float32("model.norm.weight", (3,))
    with pytest.raises(InvalidArgumentError, match=r"shape 7B is unknown, there are 0\.1B"):
        shape_named("7B")
