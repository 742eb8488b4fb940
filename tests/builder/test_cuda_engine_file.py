"""Headers of cuda engines that are not what was written: an error in one sentence, and soon."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm.builder.cuda_engine_file import ITEMSIZES, CudaFile, tensor_shapes, type_of, write_cuda_file
from faser_trtllm.errors import EngineFileError

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 40,
    "windows": [8, 0],
    "tied": False,
}


BLOCK: dict[str, Any] = {
    "layers": [1, 2],
    "windows": [0, 8],
    "causal": [0, 1],
    "num_features": 64,
    "block_size": 4,
    "first_slot": 1,
    "mask_token_id": 39,
    **dict.fromkeys(("markov_rank", "selector_rank", "selector_top_k", "conv_taps", "conv_group_size"), 0),
    **dict.fromkeys(("logit_softcap", "logit_scale", "embedding_scale"), 1.0),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "target" / "rank0.engine", MODEL)


def written(path: Path, model: dict[str, Any]) -> Path:
    path.parent.mkdir()
    sizes = {
        name: int(np.prod(shape)) * ITEMSIZES[type_of(name, "bfloat16")] for name, shape in tensor_shapes(model).items()
    }
    zeros = [(name, lambda size=size: np.zeros(size, np.uint8)) for name, size in sizes.items()]
    write_cuda_file(path, model, [0, 1, 2], "bfloat16", zeros, lambda name: None)
    return path


def test_what_is_written_is_read(path: Path) -> None:
    with CudaFile.open(path) as file:
        assert (file.model, file.segments, file.dtype) == (MODEL, (0, 1, 2), "bfloat16")
        for name, shape in tensor_shapes(MODEL).items():
            assert file.array(name)[0].shape == shape


@pytest.mark.parametrize(
    "damage",
    [
        lambda faser: faser["model"].update(head=5),
        lambda faser: faser["model"].update(head="eagle3"),
        lambda faser: faser.update(model=[1]),
        lambda faser: faser.update(dtype=[]),
        lambda faser: faser["model"].update(num_layers=2**40),
        lambda faser: faser["model"].update(num_layers="2"),
        lambda faser: faser["model"].update(windows=[8]),
        lambda faser: faser["model"].update(expert_quantization="int4"),
        lambda faser: faser["model"].update(expert_quantization="mxfp4"),
        lambda faser: faser["model"].update(medusa={"num_heads": 2**40, "num_layers": 1}),
        lambda faser: faser["model"].update(medusa=[]),
        lambda faser: faser.pop("segments"),
        lambda faser: faser.update(segments=[0, 5]),
        lambda faser: faser.update(segments=7),
        lambda faser: "[]",
        lambda faser: "[" * 200_000,
        lambda faser: '{"version": 1, "version": 1}',
    ],
)
def test_a_damaged_header_gets_a_sentence(path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    check_damage(path, damage)


@pytest.mark.parametrize("change", [{"windows": [0]}, {"causal": []}, {"block_size": "4"}, {"logit_scale": None}])
def test_a_damaged_block_drafter_gets_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    path = written(tmp_path / "draft" / "rank0.engine", MODEL | {"block": BLOCK})
    CudaFile.open(path).close()
    check_damage(path, lambda faser: faser["model"]["block"].update(change))


def check_damage(path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    whole = path.read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    header = json.loads(whole[8 : 8 + size])
    faser = json.loads(header["__metadata__"]["faser"])
    text = damage(faser)
    header["__metadata__"]["faser"] = (
        text if isinstance(text, str) and text.startswith(("[", "{")) else json.dumps(faser)
    )
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + whole[8 + size :])
    with pytest.raises(EngineFileError, match=r"the header is damaged .*rebuild it with faser build") as caught:
        CudaFile.open(path)
    assert "\n" not in str(caught.value)
