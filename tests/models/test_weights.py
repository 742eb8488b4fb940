from __future__ import annotations

import json
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import load_file, save_file

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.weights import (
    CheckpointWeights,
    bfloat16_from_float32,
    check_shapes,
    expected_shapes,
    float32_from_bfloat16,
)
from tests.support.checkpoints import make_checkpoint
from tests.support.effort import examples


@settings(max_examples=examples(50))
@given(npst.arrays(np.uint32, st.integers(1, 40)))
def test_rounding_is_that_of_torch(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    got = float32_from_bfloat16(bfloat16_from_float32(values))
    np.testing.assert_array_equal(got, expected.float().numpy())


def test_rounding_ties_to_even_and_overflows_to_infinity() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7FFFFFFF], np.uint32)
    assert [hex(v) for v in bfloat16_from_float32(bits.view(np.float32))] == [
        "0x3f80",
        "0x3f82",
        "0x7f80",
        "0x7fc0",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_those_that_safetensors_reads(tmp_path: Path, dtype: str, sharded: bool) -> None:
    directory = make_checkpoint(tmp_path, dtype=dtype, sharded=sharded)
    theirs: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        theirs |= load_file(file)
    shapes = expected_shapes(load_model_config(directory))
    assert shapes.keys() == theirs.keys()
    with CheckpointWeights(directory) as weights:
        for name, shape in shapes.items():
            fp32 = weights.float32(name, shape)
            np.testing.assert_array_equal(fp32, theirs[name].float().numpy())
            bits = weights.bfloat16(name, shape)
            np.testing.assert_array_equal(float32_from_bfloat16(bits), theirs[name].bfloat16().float().numpy())


def test_arrays_outlive_the_reader(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    with CheckpointWeights(directory) as weights:
        bits = weights.bfloat16("model.norm.weight", (64,))
        copy = bits.copy()
    np.testing.assert_array_equal(bits, copy)


def test_shape_and_missing_tensors_are_named(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    config = load_model_config(directory)
    with CheckpointWeights(directory) as weights:
        with pytest.raises(
            CheckpointError, match=r"model\.norm\.weight has shape \[64\], the configuration asks for \[65\]"
        ):
            weights.float32("model.norm.weight", (65,))
        with pytest.raises(CheckpointError, match=r"tensor model\.norms\.weight is missing"):
            weights.float32("model.norms.weight", (64,))
        check_shapes(weights, expected_shapes(config))
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data | {"intermediate_size": 128}))
    with (
        CheckpointWeights(directory) as weights,
        pytest.raises(
            CheckpointError,
            match=r"gate_proj\.weight has shape \[96, 64\], the configuration asks for \[128, 64\]",
        ),
    ):
        check_shapes(weights, expected_shapes(load_model_config(directory)))


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, num_layers=1, hidden_size=32, vocab_size=40)
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for size in [0, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: ") as caught:
            CheckpointWeights(directory)
        assert "\n" not in str(caught.value)


ONE = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
EIGHT = b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 8]}}',
        b"{" + ONE + b"}",
        b"{" + ONE + b', "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b"{" + ONE + b', "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b"{" + EIGHT + b", " + EIGHT + b"}",
        b"{" + EIGHT + b", " + EIGHT.replace(b'"a"', b'"b"') + b"}",
        b"[" * 200_000,
        b"{" + EIGHT + b', "b": {"dtype": "F32", "shape": [0, ' + b"1, " * 99 + b'1], "data_offsets": [8, 8]}}',
        b"{" + EIGHT + b', "b": {"dtype": "F32", "shape": [0, 4611686018427387904], "data_offsets": [8, 8]}}',
        b'{"a": ' + b"[" * 200_000,
        b"{" + EIGHT + b"}" + b" " * (8 << 20),
    ],
    ids=lambda header: header[:40].decode(),
)
def test_damaged_headers(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"bytes are a truncated or damaged safetensors file .*; fetch it again"):
        CheckpointWeights(tmp_path)


@pytest.mark.parametrize("file", ["a\0.safetensors", "\ud800.safetensors", "x" * 300, "..", "absent.safetensors"])
def test_names_in_the_index_that_no_file_has(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"cannot be read in|is not the name of a file"):
        CheckpointWeights(tmp_path)


def test_other_types_are_refused_when_they_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with (
        CheckpointWeights(tmp_path) as weights,
        pytest.raises(CheckpointError, match="tensor a is of type I8; it must be BF16 or F16 or F32"),
    ):
        weights.bfloat16("a", (4,))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"has neither model\.safetensors nor .*; convert other files to safetensors"
    ):
        CheckpointWeights(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        CheckpointWeights(tmp_path / "absent")
    directory = make_checkpoint(tmp_path / "sharded", sharded=True)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        CheckpointWeights(directory)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(4)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor x is in both a\.safetensors and b\.safetensors"):
        CheckpointWeights(tmp_path)


def test_an_index_cannot_point_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="is not the name of a file next to it"):
        CheckpointWeights(tmp_path)


@pytest.mark.parametrize("change", [None, "copy", "last", "shape"])
def test_a_head_that_is_no_copy_of_the_embedding_is_the_models_head(tmp_path: Path, change: str | None) -> None:
    """transformers 5 does so too, although config.json ties the two; the test compares with it."""
    from transformers import AutoModelForCausalLM  # here, since every worker collects this file

    directory = make_checkpoint(tmp_path, tie=True)
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    if change is not None:
        head = tensors["lm_head.weight"] = embedding.clone()
        head[-1, -1] += 1.0 if change == "last" else 0.0
        tensors["lm_head.weight"] = head[:-1].clone() if change == "shape" else head
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with ExitStack() as stack:
        if change == "shape":
            with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[319, 64\], the configuration asks"):
                open_checkpoint(directory, stack)
            return
        found = open_checkpoint(directory, stack)
        assert found.config.tie_word_embeddings == (change != "last")
        assert len(found.notes) == (change == "last")
        used = "model.embed_tokens.weight" if found.config.tie_word_embeddings else "lm_head.weight"
        ours = found.weights.bfloat16(used, (320, 64)).copy()
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).lm_head.weight
    assert (ours.view(np.int16) == theirs.detach().view(torch.int16).numpy()).all()
