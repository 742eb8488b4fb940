from __future__ import annotations

import ctypes
import json
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm.builder.engine_file import (
    EngineFile,
    pack_matrix,
    tensor_sizes,
    write_engine_file,
)
from faser_trtllm.errors import EngineFileError
from faser_trtllm.models.config import layer_windows
from faser_trtllm.models.experts import SOFTMAX, ExpertsConfig
from tests.support.packed_weights import unpack_matrix

EXPERTS = ExpertsConfig(4, 2, 50, SOFTMAX, norm_topk=True).sizes()
MODEL = {
    "num_layers": 2,
    "hidden_size": 40,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 50,
    "vocab_size": 70,
    "max_seq_len": 64,
    "windows": [0, 0],
    "rms_norm_eps": 1e-5,
    "rope_attention_factor": 1.0,
    "tied": False,
}


def contents() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 256, nbytes, np.uint8)
        for name, (nbytes, required) in tensor_sizes(MODEL).items()
        if required or "bias" in name
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "target" / "rank0.engine"
    path.parent.mkdir()
    write_engine_file(path, MODEL, [0, 1, 2], contents().items())
    return path


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (64, 32), (65, 33), (130, 100)])
def test_packing_follows_the_header(num_out: int, num_in: int) -> None:
    weight = np.random.default_rng(0).integers(1, 65536, (num_out, num_in)).astype(np.uint16)
    packed = pack_matrix(weight)
    in_padded = (num_in + 31) // 32 * 32
    assert packed.shape == ((num_out + 63) // 64, in_padded // 2, 64)
    assert packed.dtype == np.uint32
    for panel, i, j in np.ndindex(packed.shape):
        low, high = packed[panel, i, j] & 0xFFFF, packed[panel, i, j] >> 16
        for half, value in enumerate((low, high)):
            out, column = 64 * panel + j, 2 * i + half
            assert value == (weight[out, column] if out < num_out and column < num_in else 0)
    np.testing.assert_array_equal(unpack_matrix(packed, num_out, num_in), weight)


def test_packing_takes_bf16_bits_only() -> None:
    with pytest.raises(ValueError, match="uint16 matrix"):
        pack_matrix(np.zeros((2, 2), np.float32))  # type: ignore[arg-type]


def test_what_is_written_is_mapped_aligned(path: Path) -> None:
    with EngineFile.open(path) as file:
        assert file.header["model"] == MODEL
        assert file.header["segments"] == [0, 1, 2]
        assert file.header["file_size"] == path.stat().st_size
        offsets = [entry["offset"] for entry in file.header["tensors"].values()]
        assert min(offsets) % 4096 == 0
        for name, content in contents().items():
            address = file.address(name)
            assert address is not None
            assert address % 64 == 0
            assert ctypes.string_at(address, content.nbytes) == content.tobytes()
            np.testing.assert_array_equal(file.array(name, np.uint8), content)
        assert file.address("layers.0.q_norm") is None
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.address("lm_head")


def test_sources_are_made_one_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def source(content: np.ndarray) -> Callable[[], np.ndarray]:
        def make() -> np.ndarray:
            array = content.copy()
            made.append(weakref.ref(array))
            alive.append(sum(ref() is not None for ref in made))
            return array

        return make

    told: list[str] = []
    sources = ((name, source(content)) for name, content in contents().items())
    write_engine_file(tmp_path / "rank0.engine", MODEL, [0, 2], sources, told.append)
    assert told == list(contents())
    assert alive == [1] * len(told)


def test_the_writer_notices_the_builders_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "rank0.engine"
    tensors = contents()
    missing = {name: array for name, array in tensors.items() if name != "layers.1.down"}
    with pytest.raises(ValueError, match=r"tensor layers\.1\.down is missing"):
        write_engine_file(path, MODEL, [0, 2], missing.items())
    with pytest.raises(ValueError, match="tensor lm_head of 4 bytes"):
        write_engine_file(path, MODEL, [0, 2], (tensors | {"lm_head": np.zeros(4, np.uint8)}).items())
    with pytest.raises(ValueError, match="tensor extra"):
        write_engine_file(path, MODEL, [0, 2], (tensors | {"extra": np.zeros(4, np.uint8)}).items())
    for segments in ([0], [0, 1], [1, 2], [0, 2, 2], [0, 2, 1]):
        with pytest.raises(ValueError, match="segments"):
            write_engine_file(path, MODEL, segments, tensors.items())


def test_a_header_that_is_nested_too_deeply(path: Path) -> None:
    header = b"[" * 200_000
    path.write_bytes(struct.pack("<8sII", b"FASERENG", 1, len(header)) + header)
    with pytest.raises(EngineFileError, match=r"the header is damaged .it is nested deeper than"):
        EngineFile.open(path)


def test_every_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for size in (0, 3, 15, 16, 200, 4096, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(EngineFileError, match=r"target/rank0\.engine.*rebuild it with faser build") as caught:
            EngineFile.open(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole[:-1])
    with pytest.raises(EngineFileError, match=f"{len(whole) - 1} of {len(whole)} bytes, the file is truncated"):
        EngineFile.open(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(EngineFileError, match=f"{len(whole) + 1} bytes where {len(whole)} were written"):
        EngineFile.open(path)


@pytest.mark.parametrize("window", [0, 8])
def test_a_file_with_one_window_for_all_layers_still_opens(tmp_path: Path, window: int) -> None:
    """Builds wrote such files before each layer had its own window."""
    path = tmp_path / "rank0.engine"
    old = {name: value for name, value in MODEL.items() if name != "windows"} | {"sliding_window": window}
    write_engine_file(path, old, [0, 1, 2], contents().items())
    with EngineFile.open(path) as file:
        assert layer_windows(file.header["model"]) == [window, window]


def test_other_files_are_refused(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(b"SAFETENS" + whole[8:])
    with pytest.raises(EngineFileError, match="is not an engine file"):
        EngineFile.open(path)
    path.write_bytes(whole[:8] + struct.pack("<I", 9) + whole[12:])
    with pytest.raises(EngineFileError, match="has version 9, this faser reads 1"):
        EngineFile.open(path)
    with pytest.raises(EngineFileError, match="cannot be read"):
        EngineFile.open(tmp_path / "absent.engine")


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header["tensors"]["lm_head"].update(offset=header["file_size"] - 64),
        lambda header: header["tensors"]["lm_head"].update(offset=-64),
        lambda header: header["tensors"]["lm_head"].update(offset=8),
        lambda header: header["tensors"]["lm_head"].update(offset=64.0),
        lambda header: header["tensors"]["lm_head"].update(nbytes=64),
        lambda header: header["tensors"].pop("lm_head"),
        lambda header: header["tensors"].update(other={"offset": 0, "nbytes": 0}),
        lambda header: header["model"].update(vocab_size=71),
        lambda header: header["model"].update(hidden_size="40"),
        lambda header: header["model"].update(num_heads=-1),
        lambda header: header["model"].update(windows=[0.5, 0]),
        lambda header: header["model"].update(windows=[0]),
        lambda header: header["model"].update(windows=8),
        lambda header: header["model"].update(windows=[-1, 0]),
        lambda header: header["model"].pop("windows"),
        lambda header: header["model"].update(has_sinks=True),
        lambda header: header["model"].update(norms_all_heads=[1]),
        lambda header: header["model"].update(quantization={"bits": 4, "group_size": 32, "is_mxfp4": True}),
        lambda header: header["model"].update(num_layers=2**40),
        lambda header: header["model"].pop("head_dim"),
        lambda header: header.update(segments=[0, 3]),
        lambda header: header.update(segments=5),
        lambda header: header.pop("tensors"),
        lambda header: header.update(file_size="many"),
        lambda header: header.update(file_size=float("inf")),
        lambda header: header["model"].update(num_layers=100_000),
        lambda header: header["model"].update(vocab_size=10**4000),
        lambda header: header["model"].update(medusa={"num_heads": 10**9, "num_layers": 10**9}),
        lambda header: header["model"].update(head={"layers": [10**4000]}),
        lambda header: header["model"].update(experts=EXPERTS | {"num_experts": 2**30}),
        lambda header: header["model"].update(experts=EXPERTS | {"top_k": 5}),
        lambda header: header["model"].update(experts=EXPERTS | {"top_k": 0}),
        lambda header: header["model"].update(experts=EXPERTS | {"scoring": "hash"}),
        lambda header: header["model"].update(experts=EXPERTS | {"norm_topk": 1}),
        lambda header: header["model"].update(experts=EXPERTS | {"intermediate_size": 2**20}),
        lambda header: header["model"].update(experts={"num_experts": 4}),
        lambda header: header["model"].update(experts=EXPERTS),
    ],
)
def test_a_damaged_header_never_reaches_the_engine(path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    whole = path.read_bytes()
    (header_len,) = struct.unpack("<I", whole[12:16])
    header = json.loads(whole[16 : 16 + header_len])
    damage(header)
    path.write_bytes(whole[:16] + json.dumps(header).encode().ljust(header_len) + whole[16 + header_len :])
    with pytest.raises(EngineFileError, match="the header is damaged"):
        EngineFile.open(path)
