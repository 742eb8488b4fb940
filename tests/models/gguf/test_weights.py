"""GGUF files of every supported family against the Hugging Face folder they were made of, up to the engine's logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.gguf.file import READ_TYPES, TensorType
from faser_trtllm.models.rope import RopeConfig, rope_frequencies
from tests.models.gguf.opened import opened
from tests.support.checkpoints import LLAMA3_ROPE, YARN_ROPE, make_checkpoint, make_pair, write_safetensors
from tests.support.engine_logits import NUM_TOKENS, engine_logits
from tests.support.gguf_writer import (
    ARRAY,
    F32,
    STRING,
    TYPE_BF16,
    TYPE_F16,
    TYPE_F32,
    TYPE_Q4_0,
    TYPE_Q8_0,
    U32,
    Tensor,
    decode,
    encode,
    gguf_bytes,
    gguf_of,
    read_float32,
    write_gguf,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 1}),
    "llama-head-32": ("llama", {"head_dim": 32, "rope": {"rope_theta": 500000.0}}),
    "llama-linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.5}}),
    "llama-yarn": ("llama", {"rope": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"rope": {"rope_theta": 1000000.0}}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie": True}),
}
TOKENS = list(range(2, 2 + NUM_TOKENS))


def logits(path: Path, output: Path) -> np.ndarray:
    engines = build_engines(BuildOptions(path, None, output, max_seq_len=256))
    assert engines is not None
    return engine_logits(engines.target_path, TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_bf16_files_are_those_of_the_folder(tmp_path: Path, family: str) -> None:
    architecture, options = FAMILIES[family]
    folder = make_checkpoint(tmp_path / "folder", architecture, **options)
    file = write_gguf(tmp_path / "model.gguf", folder, TYPE_BF16)
    np.testing.assert_array_equal(logits(file, tmp_path / "a"), logits(folder, tmp_path / "b"))


@pytest.mark.parametrize(("kind", "dtype"), [(TYPE_F16, "float16"), (TYPE_F32, "float32")])
def test_logits_of_f16_and_f32_files_are_those_of_the_folder(tmp_path: Path, kind: int, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "folder", dtype=dtype)
    file = write_gguf(tmp_path / "model.gguf", folder, kind)
    np.testing.assert_array_equal(logits(file, tmp_path / "a"), logits(folder, tmp_path / "b"))


@pytest.mark.parametrize("kind", [TYPE_Q4_0, TYPE_Q8_0])
def test_logits_of_quantized_files_are_those_of_the_dequantized_folder(tmp_path: Path, kind: int) -> None:
    folder = make_checkpoint(tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", folder, kind)
    rounded = make_checkpoint(tmp_path / "rounded", dtype="float32")
    kinds = [own for _, own, _ in gguf_of(folder, kind)[1].values()]
    values = {  # rows are quantized one by one, so their order does not matter
        name: decode(encode(array, own), own, array.shape)
        for (name, array), own in zip(read_float32(folder).items(), kinds, strict=True)
    }
    write_safetensors(rounded, values, "float32")
    from_file = logits(file, tmp_path / "a")
    np.testing.assert_array_equal(from_file, logits(rounded, tmp_path / "b"))
    assert (from_file != logits(folder, tmp_path / "c")).any()


@pytest.mark.parametrize("kind", READ_TYPES)
def test_every_type_is_decoded_as_the_format_says(tmp_path: Path, kind: TensorType) -> None:
    folder = make_checkpoint(tmp_path / "folder", hidden_size=256)
    metadata, tensors = gguf_of(folder, TYPE_F32)
    name, shape = "token_embd.weight", tensors["token_embd.weight"][0]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_bytes = shape[0] * shape[1] // block_values * block_bytes
    raw = np.random.default_rng(kind).integers(0, 256, num_bytes, np.uint8) & 0x3B  # finite in every type
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors | {name: (shape, int(kind), raw.tobytes())}))
    with opened(path) as file:
        got = file.checkpoint.weights.float32("model.embed_tokens.weight", shape)
        assert set(file.checkpoint.stored_types) == {"F32", kind.name}
    np.testing.assert_array_equal(got, decode(raw.tobytes(), kind, shape))


def test_llama3_factors_give_its_frequencies(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder", rope=LLAMA3_ROPE)
    metadata, tensors = gguf_of(folder, TYPE_BF16)
    rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"}
    wanted, _ = rope_frequencies(RopeConfig("llama3", 10000.0, **rope), 16)  # type: ignore[arg-type]
    plain, _ = rope_frequencies(RopeConfig(), 16)
    factors = (plain / wanted).astype("<f4")
    tensors = {"rope_freqs.weight": ((8,), TYPE_F32, factors.tobytes())} | tensors
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    with opened(path) as file:
        got, factor = rope_frequencies(file.checkpoint.config.rope, 16)
    assert factor == 1.0
    np.testing.assert_allclose(got, wanted, rtol=3e-7)
    assert (got != plain).any()
    error = np.abs(logits(path, tmp_path / "a") - logits(folder, tmp_path / "b")).max()
    assert error < 1e-2 * np.abs(logits(folder, tmp_path / "b")).max()


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_context_length_includes_the_rope_scaling(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 256}
    folder = make_checkpoint(tmp_path / "folder", rope=rope, max_position_embeddings=384)
    with opened(write_gguf(tmp_path / "x.gguf", folder, TYPE_BF16)) as file:
        assert file.checkpoint.config.rope.factor == 4.0
        assert file.checkpoint.config.max_position_embeddings == 384


def changed(
    tmp_path: Path, keys: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
) -> Path:
    """A file with other metadata or tensors; None takes one out."""
    metadata, all_tensors = gguf_of(make_checkpoint(tmp_path / "folder", num_layers=1), TYPE_BF16)
    merged = {key: value for key, value in (metadata | (keys or {})).items() if value is not None}
    kept = {name: tensor for name, tensor in (all_tensors | (tensors or {})).items() if tensor is not None}
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(merged, kept))
    return path


SCALING = "llama.rope.scaling."
VECTOR = ((8,), TYPE_F32, np.zeros(8, "<f4").tobytes())


@pytest.mark.parametrize(
    ("keys", "tensors", "sentence"),
    [
        (
            {"general.architecture": (STRING, "gemma3")},
            {},
            "general.architecture 'gemma3' is not supported; supported are llama, qwen2",
        ),
        (
            {"general.architecture": (ARRAY, (STRING, ["llama", "qwen2"]))},
            {},
            r"general.architecture \['llama', 'qwen2'\] is not supported",
        ),
        (
            {"tokenizer.ggml.model": (ARRAY, (U32, list(range(1000, 1100))))},
            {},
            r"tokenizer.ggml.model is array\(\[1000, 1001, .*, only 'gpt2' and 'llama' are read",
        ),
        (
            {SCALING + "type": (ARRAY, (U32, list(range(1000, 1100))))},
            {},
            "llama.rope.scaling.type is .*; it must be a text",
        ),
        ({"llama.rope.scale_linear": (F32, 4.0)}, {}, "llama.rope.scale_linear is 4.0, only its newer spelling"),
        ({"general.architecture": None}, {}, "general.architecture None is not supported; supported are"),
        (
            {"general.architecture": (STRING, "deepseek2")},
            {},
            r"general.architecture 'deepseek2' is not supported; its attention is latent \(MLA\)",
        ),
        (
            {"llama.block_count": (U32, 4_000_000_000)},
            {},
            "llama.block_count is 4000000000, but 12 tensors are too few",
        ),
        ({"llama.block_count": None}, {}, "llama.block_count is missing"),
        ({"llama.attention.head_count": (U32, 0)}, {}, "llama.attention.head_count is 0; it must be at least 1"),
        (
            {"llama.attention.head_count": (STRING, "4")},
            {},
            "llama.attention.head_count is '4'; it must be one integer",
        ),
        ({"llama.attention.value_length": (U32, 8)}, {}, "llama.attention.value_length is 8, only 16"),
        ({"llama.rope.dimension_count": (U32, 8)}, {}, "llama.rope.dimension_count is 8, only 16"),
        ({"llama.rope.freq_base": (F32, float("nan"))}, {}, "llama.rope.freq_base is nan; it must be a number"),
        ({SCALING + "type": (STRING, "longrope"), SCALING + "factor": (F32, 2.0)}, {}, "'longrope'.* not supported"),
        ({SCALING + "factor": (F32, 4.0)}, {}, r"llama.rope.scaling.factor is 4.0 with rope scaling 'none'"),
        ({SCALING + "attn_factor": (F32, 1.5)}, {}, "llama.rope.scaling.attn_factor is 1.5 with rope scaling"),
        (
            {"llama.embedding_length": (U32, 128)},
            {},
            r"embed_tokens.weight has shape \[320, 64\], .* asks for \[320, 128\]",
        ),
        ({}, {"blk.0.attn_k.weight": None}, "tensor blk.0.attn_k.weight is missing"),
        (
            {},
            {"blk.0.attn_q.bias": VECTOR},
            r"self_attn.q_proj.bias has shape \[8\], the configuration asks for \[64\]",
        ),
        ({}, {"blk.0.ffn_gate_inp.weight": VECTOR}, "tensor blk.0.ffn_gate_inp.weight belongs to no LlamaForCausalLM"),
        ({}, {"rope_freqs.weight": VECTOR}, "rope_freqs.weight has factors that are not positive"),
        ({}, {"rope_freqs.weight": ((4,), TYPE_F32, bytes(16))}, r"rope_freqs.weight is F32 of shape \[4\]"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Tensor | None], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught, opened(changed(tmp_path, keys, tensors)):
        pass
    assert "\n" not in str(caught.value)


def test_values_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    shape = (96, 64)
    data = np.full(shape, np.inf, "<f2").tobytes()
    path = changed(tmp_path, tensors={"blk.0.ffn_up.weight": (shape, TYPE_F16, data)})
    with (
        opened(path) as file,
        pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has values that are infinite"),
    ):
        list(file.arrays())


def test_bf16_matrices_are_views_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_checkpoint(tmp_path / "folder"), TYPE_BF16)
    with opened(path) as file:
        name = "model.layers.0.mlp.up_proj.weight"
        bits = file.checkpoint.weights.bfloat16(name, file.shape(name))
        assert not bits.flags.owndata
        assert not bits.flags.writeable


def test_a_pair_of_a_folder_and_a_file_builds_and_is_recognized(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "pair")
    file = write_gguf(tmp_path / "draft.gguf", draft, TYPE_Q8_0)
    options = BuildOptions(target, file, tmp_path / "engines", max_seq_len=64)
    notes: list[str] = []
    engines = build_engines(options, note=notes.append)
    assert engines is not None
    assert engines.has_draft
    assert notes == ["draft: Q8_0 weights become bfloat16, which keeps 8 significant bits"]
    manifest = (engines.path / "manifest.json").stat().st_ino
    build_engines(options)
    assert (engines.path / "manifest.json").stat().st_ino == manifest
    file.write_bytes(gguf_bytes(*gguf_of(draft, TYPE_BF16)))
    build_engines(options)
    assert (engines.path / "manifest.json").stat().st_ino != manifest


def test_the_engine_has_the_same_config_as_from_the_folder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder", "qwen3", rope={"rope_theta": 1000000.0})
    file = write_gguf(tmp_path / "x.gguf", folder, TYPE_BF16)
    with opened(file) as ours, opened(folder) as theirs:
        assert ours.checkpoint.config == dataclasses.replace(theirs.checkpoint.config, torch_dtype="bfloat16")
    configs = []
    for number, path in enumerate((file, folder)):
        engines = build_engines(BuildOptions(path, None, tmp_path / f"engines{number}"))
        assert engines is not None
        configs.append(json.loads((engines.path / "target" / "config.json").read_text()))
    assert configs[0] == configs[1]
