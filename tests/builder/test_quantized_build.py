"""`faser build --quantization`: what is written, and that engines say nearly what the checkpoint says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.engine_file import EngineFile, pack_quantized
from faser_trtllm.errors import CheckpointError
from faser_trtllm.fingerprint import fingerprint_of
from faser_trtllm.models.quantized_weight import Scheme, from_integers, quantize
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.engine_logits import NUM_TOKENS, engine_logits


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    target, draft = make_pair(tmp_path / "checkpoints", num_layers=2)
    return BuildOptions(target, draft, tmp_path / "engines")


def built(options: BuildOptions) -> EngineDir:
    engines = build_engines(options)
    assert engines is not None
    return engines


@pytest.mark.parametrize("bits", [8, 4])
def test_words_hold_neighboring_inputs_of_one_output(bits: int) -> None:
    num_out, num_in = 70, 96
    low = -(2 ** (bits - 1))
    integers = np.random.default_rng(bits).integers(low, -low, (num_out, num_in), np.int8)
    scales = np.arange(num_out * 3, dtype=np.float32).reshape(num_out, 3)
    words, packed_scales = pack_quantized(from_integers(integers, scales, 32, bits))
    per_word = 32 // bits
    assert words.shape == (2, num_in // per_word, 64)
    assert packed_scales.shape == (2, 3, 64)
    for output, index in [(0, 0), (69, 95), (64, 33), (5, 31)]:
        word = int(words[output // 64, index // per_word, output % 64])
        assert word >> bits * (index % per_word) & 2**bits - 1 == int(integers[output, index]) % 2**bits
        assert packed_scales[output // 64, index // 32, output % 64] == scales[output, index // 32]
    assert not words[1, :, 6:].any()
    assert not packed_scales[1, :, 6:].any()


def test_target_and_draft_are_quantized_apart(options: BuildOptions) -> None:
    plain = built(options)
    sizes = plain.target_path.stat().st_size, plain.draft_path.stat().st_size
    before = fingerprint_of(plain.path, 1)
    engines = built(replace(options, quantization="W8A16"))
    assert engines.target_path.stat().st_size < sizes[0]
    assert engines.draft_path.stat().st_size == sizes[1]
    assert fingerprint_of(engines.path, 1) != before, "a cost table of bf16 engines is another's"
    config = json.loads((engines.target_path.parent / "config.json").read_text())
    assert config["faser"]["quantization"]["quant_algo"] == "W8A16"
    assert config["faser"]["quantization"]["exclude_modules"] == ["lm_head"]
    with EngineFile.open(engines.target_path) as file, CheckpointWeights(options.checkpoint_dir) as weights:
        down = weights.float32(
            "model.layers.1.mlp.down_proj.weight", weights.shape("model.layers.1.mlp.down_proj.weight")
        )
        words, scales = pack_quantized(quantize(down, Scheme(8, 0)))
        np.testing.assert_array_equal(file.array("layers.1.down", np.uint32), words.reshape(-1))
        np.testing.assert_array_equal(file.array("layers.1.down_scales", np.float32), scales.reshape(-1))


def test_the_same_quantization_is_built_once(options: BuildOptions) -> None:
    first = built(replace(options, quantization="int4"))
    inode = first.target_path.stat().st_ino
    assert built(replace(options, quantization="W4A16:32")).target_path.stat().st_ino == inode
    int8 = built(replace(options, quantization="int8")).target_path.stat().st_ino
    assert int8 != inode
    assert built(replace(options, quantization="W8A8")).target_path.stat().st_ino != int8


@pytest.mark.parametrize(
    ("quantization", "lm_head", "tie", "limit"),
    [
        ("int8", False, True, 0.08),
        ("int8", True, True, 0.08),
        ("W8A8", True, True, 0.08),
        ("W4A8:128", True, False, 0.6),
        ("int4", False, False, 0.5),
        ("int4:128", True, False, 0.6),
    ],
)
def test_logits_are_near_those_of_bf16(
    quantization: str, lm_head: bool, tie: bool, limit: float, tmp_path: Path
) -> None:
    """A wrong scale or order of inputs would leave nothing in common: an error of 1.4."""
    directory = make_checkpoint(
        tmp_path / "checkpoint", hidden_size=128, intermediate_size=256, head_dim=32, tie=tie, num_layers=3
    )
    options = BuildOptions(directory, None, tmp_path / "bf16")
    token_ids = list(range(5, 5 + NUM_TOKENS))
    expected = engine_logits(built(options).target_path, token_ids)
    quantized = replace(options, output_dir=tmp_path / "quantized", quantization=quantization, quantize_lm_head=lm_head)
    found = engine_logits(built(quantized).target_path, token_ids)
    assert not np.array_equal(found, expected)
    error = np.sqrt(((found - expected) ** 2).mean()) / expected.std()
    assert error < limit


def test_activations_of_8_bits_are_the_engines(options: BuildOptions) -> None:
    """The same integers as weights, and other logits."""
    token_ids = list(range(5, 5 + NUM_TOKENS))
    int8, w8a8 = (
        built(replace(options, output_dir=options.output_dir / name, quantization=name)).target_path
        for name in ("int8", "W8A8")
    )
    assert not np.array_equal(engine_logits(int8, token_ids), engine_logits(w8a8, token_ids))
    config = json.loads((w8a8.parent / "config.json").read_text())
    assert config["faser"]["quantization"]["quant_algo"] == "W8A8"
    with EngineFile.open(int8) as one, EngineFile.open(w8a8) as other:
        np.testing.assert_array_equal(one.array("layers.0.qkv", np.uint32), other.array("layers.0.qkv", np.uint32))


@pytest.mark.parametrize(("was", "damaged"), [(b'"bits":4', b'"bits":3'), (b'_bits":16', b'_bits":12')])
def test_a_damaged_header_is_named(was: bytes, damaged: bytes, options: BuildOptions) -> None:
    path = built(replace(options, quantization="int4")).target_path
    path.write_bytes(path.read_bytes().replace(was, damaged))
    with pytest.raises(Exception, match=r"the header is damaged .*model\.quantization is"):
        EngineFile.open(path)


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "checkpoint", num_layers=1)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xff\x7f" * 2048
    path.write_bytes(data)
    options = BuildOptions(directory, None, tmp_path / "engines", quantization="int8", quantize_lm_head=True)
    with pytest.raises(CheckpointError, match=r"of the checkpoint cannot be quantized: a weight is not finite"):
        build_engines(options)
    assert not (tmp_path / "engines").exists()
