"""AWQ and GPTQ checkpoints stand for the weights that were packed into them, up to the engine's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm.errors import CheckpointError
from tests.models.checkpoint.dequantized import check_logits
from tests.models.gguf.opened import opened
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_writer import write_quantized

KINDS: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq"},
    "awq-one-group": {"method": "awq", "group_size": -1},
    "gptq": {"method": "gptq"},
    "gptq-one-group": {"method": "gptq", "group_size": -1},
    "gptq-sym": {"method": "gptq", "symmetric": True},
    "gptq-8-bit": {"method": "gptq", "bits": 8, "group_size": 32},
    "gptq-desc-act": {"method": "gptq", "desc_act": True},
    "gptq-v2": {"method": "gptq", "v2": True},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "c", dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_were_packed(tmp_path: Path, plain: Path, kind: str) -> None:
    folder, exact = write_quantized(plain, tmp_path / "q", **KINDS[kind])
    with opened(folder) as found:
        weights = found.checkpoint.weights
        for name, values in exact.items():
            np.testing.assert_array_equal(weights.float32(name, weights.shape(name)), values)


@pytest.mark.parametrize("kind", ["awq", "gptq-desc-act"])
def test_logits_are_those_of_the_dequantized_checkpoint(tmp_path: Path, plain: Path, kind: str) -> None:
    folder, exact = write_quantized(plain, tmp_path / "q", **KINDS[kind])
    same = make_checkpoint(tmp_path / "same", dtype="float32")
    notes = check_logits(folder, same, exact)
    stored = "AWQ 4-bit, F32" if kind == "awq" else "F32, GPTQ 4-bit"
    assert notes == [
        f"target: {stored} weights become bfloat16, which keeps 8 significant bits",
        "target: F32 weights become bfloat16, which keeps 8 significant bits",
    ]


def test_a_matrix_of_many_pieces(tmp_path: Path) -> None:
    wide = make_checkpoint(tmp_path / "wide", dtype="float32", hidden_size=16, num_layers=1, intermediate_size=1088)
    for method in ("awq", "gptq"):
        folder, exact = write_quantized(wide, tmp_path / method, method, group_size=64 if method == "gptq" else 16)
        name = "model.layers.0.mlp.down_proj.weight"
        with opened(folder) as found:
            np.testing.assert_array_equal(found.checkpoint.weights.float32(name, (16, 1088)), exact[name])


BIAS = "model.layers.0.self_attn.q_proj.bias"


def test_zero_biases_of_models_without_any_are_left_out(tmp_path: Path, plain: Path) -> None:
    folder, _ = write_quantized(plain, tmp_path / "zero", "gptq", more={BIAS: np.zeros(64, np.float16)})
    with opened(folder):
        pass
    folder, _ = write_quantized(plain, tmp_path / "one", "gptq", more={BIAS: np.eye(1, 64, dtype=np.float16)[0]})
    with pytest.raises(CheckpointError, match=f"tensor {BIAS} is not zero, but a LlamaForCausalLM"), opened(folder):
        pass


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', supported: awq or gptq or "),
        ("gptq", {"quant_method": None}, "quant_method is None"),
        ("gptq", {"quant_method": ["gptq"]}, "quant_method is "),
        ("gptq", {"bits": 3}, "bits is 3, supported: 4 or 8"),
        ("awq", {"bits": 8}, "bits is 8, supported: 4"),
        ("awq", {"version": "gemv"}, "version is 'gemv', supported: gemm"),
        ("awq", {"zero_point": False}, "zero_point is False, supported: True"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', supported: gptq or gptq_v2"),
        ("gptq", {"group_size": 0}, "group_size is 0; it must be positive or -1"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic is "),
        (
            "gptq",
            {"group_size": 32},
            r"scales has shape \[4, 64\], which does not fit a matrix of 64 x 64 with group_size 32",
        ),
        ("gptq", {"bits": 8}, "q_proj.scales has shape"),
    ],
)
def test_what_is_not_read_is_named(
    tmp_path: Path, plain: Path, method: str, changes: dict[str, Any], sentence: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path / "q", method)
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=sentence) as caught, opened(folder):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "array", "sentence"),
    [
        ("qweight", np.zeros((8, 63), np.int32), r"q_proj\.qweight has shape \[8, 63\]"),
        ("qweight", np.zeros((8, 64), np.float32), r"q_proj\.qweight is of type F32; it must be I32"),
        ("qzeros", np.zeros((4, 7), np.int32), r"q_proj\.qzeros has shape \[4, 7\]"),
        ("scales", np.zeros(64, np.float16), r"self_attn\.q_proj are no matrices"),
        ("g_idx", np.zeros(63, np.int32), r"q_proj\.g_idx has shape \[63\]"),
        ("g_idx", np.full(64, 4, np.int32), r"q_proj\.g_idx names groups outside of 0 to 3"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, plain: Path, tensor: str, array: np.ndarray, sentence: str
) -> None:
    more = {f"model.layers.0.self_attn.q_proj.{tensor}": array}
    folder, _ = write_quantized(plain, tmp_path / "q", "gptq", more=more)
    with pytest.raises(CheckpointError, match=sentence), opened(folder) as found:
        list(found.arrays())
