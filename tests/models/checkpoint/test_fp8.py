"""fp8 checkpoints stand for the weights that were stored in them, up to the engine's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.errors import CheckpointError
from tests.models.checkpoint.dequantized import check_logits
from tests.models.gguf.opened import opened
from tests.support.checkpoints import make_checkpoint
from tests.support.fp8_writer import KINDS, LINEAR, write_fp8

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "c", dtype="float32", intermediate_size=160)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_were_stored(tmp_path: Path, plain: Path, kind: str) -> None:
    folder, exact = write_fp8(plain, tmp_path / "q", kind)
    with opened(folder) as found:
        weights = found.checkpoint.weights
        for name, values in exact.items():
            np.testing.assert_array_equal(weights.float32(name, weights.shape(name)), values)
        assert found.checkpoint.stored_types == ("F32", "F8_E4M3")


def test_every_e4m3_number_is_torchs(tmp_path: Path, plain: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(16).reshape(64, 64)
    more = {WEIGHT: every.view(torch.float8_e4m3fn), f"{WEIGHT}_scale": torch.tensor([1.0])}
    folder, _ = write_fp8(plain, tmp_path / "q", "autofp8", more)
    with opened(folder) as found:
        numbers = found.checkpoint.weights.float32(WEIGHT, (64, 64))
    np.testing.assert_array_equal(numbers, every.view(torch.float8_e4m3fn).float().numpy())
    assert np.isnan(numbers).sum() == 2 * 16


@pytest.mark.parametrize("kind", ["compressed-tensors-channel", "qwen"])
def test_logits_are_those_of_the_dequantized_checkpoint(tmp_path: Path, plain: Path, kind: str) -> None:
    folder, exact = write_fp8(plain, tmp_path / "q", kind)
    same = make_checkpoint(tmp_path / "same", dtype="float32", intermediate_size=160)
    notes = check_logits(folder, same, exact)
    assert notes[0] == "target: F32, F8_E4M3 weights become bfloat16, which keeps 8 significant bits"


def test_a_matrix_of_many_pieces(tmp_path: Path) -> None:
    tall = make_checkpoint(tmp_path / "tall", dtype="float32", hidden_size=16, num_layers=1, intermediate_size=1088)
    name = "model.layers.0.mlp.up_proj.weight"
    for kind in KINDS:
        folder, exact = write_fp8(tall, tmp_path / kind, kind)
        with opened(folder) as found:
            np.testing.assert_array_equal(found.checkpoint.weights.float32(name, (1088, 16)), exact[name])


BLOCK_SCHEME = {"strategy": "block", "block_structure": [128, 128]}


def groups(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": LINEAR | {"strategy": "tensor"} | changes}}}


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (
            "compressed-tensors",
            {"format": "pack-quantized"},
            "format is 'pack-quantized', supported: float-quantized; take",
        ),
        ("compressed-tensors", {"config_groups": {}}, "config_groups is {}; it must name groups"),
        ("compressed-tensors", {"config_groups": {"a": {"weights": None}}}, "config_groups.a.weights is None"),
        ("compressed-tensors", groups(type="int"), "group_0.weights.type is 'int', supported: float"),
        ("compressed-tensors", groups(num_bits=4), "group_0.weights.num_bits is 4, supported: 8"),
        ("compressed-tensors", groups(strategy="group"), "strategy is 'group', supported: tensor or channel or block"),
        ("compressed-tensors", groups(strategy="block"), "group_0.weights.block_structure is missing"),
        (
            "compressed-tensors",
            {"config_groups": groups()["config_groups"] | {"b": {"weights": LINEAR | BLOCK_SCHEME}}},
            "config_groups mix blocks with other scales",
        ),
        (
            "compressed-tensors",
            groups(strategy="block", block_structure="24"),
            "block_structure is '24'; it must be two",
        ),
        ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', supported: FP8 or "),
        ("modelopt-own-file", {"quant_algo": None}, "hf_quant_config.json: quantization_config.quant_algo is None"),
        ("qwen", {"fmt": "e5m2"}, "fmt is 'e5m2', supported: e4m3"),
        ("qwen", {"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]; it must be two sizes of 1 to"),
        ("qwen", {"weight_block_size": [1, 2**31]}, r"weight_block_size is \[1, 2147483648\]; it must be two sizes"),
        ("qwen", {"weight_block_size": [1, float("inf")]}, r"weight_block_size is \[1, inf\]; it must be two sizes"),
        (
            "qwen",
            {"weight_block_size": [64, 64]},
            r"q_proj.weight_scale_inv has shape \[3, 2\], which does not fit a matrix",
        ),
        ("qwen", {"weight_block_size": None}, "of 64 x 64 with one scale or one per output"),
    ],
)
def test_what_is_not_read_is_named(
    tmp_path: Path, plain: Path, kind: str, changes: dict[str, Any], sentence: str
) -> None:
    folder, _ = write_fp8(plain, tmp_path / "q", kind, **changes)
    with pytest.raises(CheckpointError, match=sentence) as caught, opened(folder):
        pass
    assert "\n" not in str(caught.value)


def test_a_matrix_without_scales_is_named(tmp_path: Path, plain: Path) -> None:
    name = "model.norm.weight"
    folder, _ = write_fp8(plain, tmp_path / "q", "autofp8", {name: torch.ones(64).to(torch.float8_e4m3fn)})
    with (
        pytest.raises(CheckpointError, match=f"{name} is of type F8_E4M3, and {name}_scale is missing"),
        opened(folder),
    ):
        pass


def test_other_types_of_8_bits_are_refused(tmp_path: Path, plain: Path) -> None:
    folder, _ = write_fp8(plain, tmp_path / "q", "autofp8", {WEIGHT: torch.ones((64, 64)).to(torch.float8_e5m2)})
    with (
        pytest.raises(CheckpointError, match="is of type F8_E5M2; it must be BF16 or F16 or F32"),
        opened(folder) as found,
    ):
        list(found.arrays())
