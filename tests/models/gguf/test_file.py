"""GGUF headers: what is read, and that no damage to them does more than raise a CheckpointError."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.gguf.file import GgufFile
from tests.models.gguf.opened import opened
from tests.support.checkpoints import make_checkpoint
from tests.support.effort import examples
from tests.support.gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    STRING,
    TYPE_BF16,
    TYPE_F32,
    U8,
    U16,
    U32,
    U64,
    gguf_bytes,
    gguf_of,
    string,
)

VALUES: dict[str, tuple[int, Any]] = {
    "u8": (U8, 200),
    "i8": (I8, -3),
    "u16": (U16, 60000),
    "u32": (U32, 4_000_000_000),
    "i32": (I32, -5),
    "f32": (F32, 1e-5),
    "bool": (BOOL, True),
    "text": (STRING, "größer 🙂"),
    "u64": (U64, 1 << 60),
    "i64": (I64, -(1 << 60)),
    "f64": (F64, 1e-5),
}
ONE = {"a": ((2, 4), TYPE_F32, np.arange(8, dtype="<f4").tobytes())}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_values_and_tensors_come_back(tmp_path: Path, version: int, alignment: int) -> None:
    arrays = {"numbers": (ARRAY, (I32, [1, -2, 3])), "texts": (ARRAY, (STRING, ["a", "", "ü"]))}
    metadata = VALUES | arrays | {"general.alignment": (U32, alignment)}
    tensors = {"a": ((3,), TYPE_F32, np.array([1, 2, 3], "<f4").tobytes()), "b": ONE["a"]}
    with GgufFile(write(tmp_path / "x.gguf", gguf_bytes(metadata, tensors, alignment, version))) as file:
        assert {key: file.metadata[key] for key in VALUES} == {key: value for key, (_, value) in VALUES.items()}
        assert file.metadata["numbers"].tolist() == [1, -2, 3]
        assert file.metadata["texts"] == ["a", "", "ü"]
        assert file.tensors["b"].shape == (2, 4)
        assert file.data("a").view("<f4").tolist() == [1, 2, 3]
        assert file.data("b").view("<f4").tolist() == list(range(8))


def test_the_gguf_package_writes_what_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("number", 7)
    writer.add_float32("small", 1e-5)
    writer.add_token_list(["a", "b"])
    matrix = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    writer.add_tensor("plain", matrix)
    writer.add_tensor("blocks", gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "x.gguf") as file:
        assert (file.metadata["number"], file.metadata["small"]) == (7, 1e-5)
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        np.testing.assert_array_equal(file.data("plain").view("<f4").reshape(4, 64), matrix)
        assert (file.tensors["blocks"].shape, file.tensors["blocks"].type.name) == ((4, 64), "Q8_0")


def header(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


HUGE = (1 << 64) - 1
KEY = string("k")
ARRAY_HEAD = KEY + struct.pack("<I", ARRAY)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", r"x\.gguf: 0 bytes that start with b'' are no GGUF file"),
        (b"PK\3\4" + bytes(100), "are no GGUF file, which starts with b'GGUF'"),
        (header(0, 0)[:8], r"x\.gguf: 8 bytes are a truncated GGUF file, whose header has 24; fetch it again"),
        (header(0, 0, version=1), "the GGUF file is version 1, only versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "the GGUF file is big-endian"),
        (header(HUGE, 0), f"it claims {HUGE} tensors in 24 bytes"),
        (header(0, HUGE), f"it claims {HUGE} metadata entries"),
        (header(0, 1, struct.pack("<Q", HUGE) + bytes(20)), f"{HUGE} bytes are needed at byte 32"),
        (header(0, 1, KEY + struct.pack("<II", 13, 0)), "the value of 'k' is of type 13"),
        (header(0, 1, ARRAY_HEAD + struct.pack("<IQ", STRING, 1 << 40)), "the array 'k' claims 1099511627776 elements"),
        (header(0, 1, ARRAY_HEAD + struct.pack("<IQ", U64, HUGE)), "the array 'k' claims"),
        (header(0, 1, ARRAY_HEAD + struct.pack("<IQ", ARRAY, 1)), "the array 'k' has elements of type 9"),
        (header(0, 2, (KEY + struct.pack("<II", U32, 0)) * 2), "the key 'k' occurs twice"),
        (header(0, 1, struct.pack("<Q", 1) + b"\xff" + bytes(8)), "a string before byte 33 is not UTF-8"),
        (gguf_bytes({"general.alignment": (U32, 24)}, {}), "general.alignment is 24; it must be a power of two"),
        (gguf_bytes({"split.count": (U16, 3)}, {}), "split.count is 3, only whole files are read; join the parts"),
        (gguf_bytes({}, {"a": ((2, 4), 99, bytes(32))}), r"tensor a is of type unknown \(99\), supported: F32, F16"),
        (gguf_bytes({}, {"a": ((1, 256), 10, bytes(84))}), r"tensor a is of type Q2_K \(10\), supported:"),
        (gguf_bytes({}, {"a": ((2, 0), TYPE_F32, b"")}), r"tensor 'a' has dimensions \[0, 2\], none may be 0"),
        (gguf_bytes({}, {"a": ((2, 48), 8, bytes(96))}), "the first must be a multiple of 32 for Q8_0"),
        (gguf_bytes({}, {"a": ((1,) * 5, TYPE_F32, bytes(4))}), "tensor 'a' has 5 dimensions; it must have 1 to 4"),
        (gguf_bytes({}, {"a": ((1 << 62, 1 << 62), TYPE_F32, bytes(4))}), "bytes, the file is truncated"),
        (gguf_bytes({}, {"a": ((2, 4), TYPE_F32, bytes(64))} | {"b": ONE["a"]}), "'b' starts at 64, the one before it"),
    ],
)
def test_damage_is_named(tmp_path: Path, data: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        GgufFile(write(tmp_path / "x.gguf", data))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the GGUF file .*absent\.gguf cannot be read: No such file"):
        GgufFile(tmp_path / "absent.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("gguf") / "c", num_layers=1, hidden_size=32, vocab_size=280)
    return write(checkpoint.parent / "whole.gguf", gguf_bytes(*gguf_of(checkpoint, TYPE_BF16)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "x.gguf"


def header_size(data: bytes | bytearray) -> int:
    return data.index(b"output_norm.weight") + 60


def read_all(path: Path) -> None:
    """Everything that a build reads; CheckpointError or nothing."""
    with opened(path) as checkpoint:
        for name, array in checkpoint.arrays():
            assert array.shape == checkpoint.shape(name)


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_any_damage_to_a_header_is_a_checkpoint_error_or_harmless(
    whole: Path, place: Path, data: st.DataObject
) -> None:
    damaged = bytearray(whole.read_bytes())
    size = header_size(damaged)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, size - 8))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([0, 1, 31, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, HUGE]).map(
                    lambda value: struct.pack("<Q", value)
                ),
            )
        )
        damaged[at : at + len(patch)] = patch
    write(place, bytes(damaged))
    sentence = ""
    tracemalloc.start()
    try:
        read_all(place)
    except CheckpointError as error:
        sentence = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert "\n" not in sentence
    assert peak < 64 << 20


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_every_cut_is_noticed_before_a_tensor_is_read(whole: Path, place: Path, data: st.DataObject) -> None:
    contents = whole.read_bytes()
    size = data.draw(st.one_of(st.integers(0, header_size(contents)), st.integers(0, len(contents) - 64)))
    write(place, contents[:size])
    with pytest.raises(CheckpointError):
        GgufFile(place)


def test_the_undamaged_file_is_read(whole: Path) -> None:
    read_all(whole)


def test_a_folder_with_a_gguf_file_says_to_name_the_file(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", b"")
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"to read model\.gguf, name the file itself"):
        open_checkpoint(tmp_path, stack)
