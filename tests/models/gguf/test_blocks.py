"""Decoding of every block type, against scalar Python written from ggml's struct definitions."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.models.gguf.blocks import BLOCK_TYPES, UNREAD_TYPES, decode
from tests.support.effort import examples

F = np.float32


def half(data: bytes, at: int) -> np.float32:
    return F(struct.unpack_from("<e", data, at)[0])


def scalar_q4(data: bytes, has_minimum: bool) -> list[np.float32]:
    d, quants = half(data, 0), data[4 if has_minimum else 2 :]
    values = []
    for j in range(32):
        q = quants[j] & 0xF if j < 16 else quants[j - 16] >> 4
        values.append(d * F(q) + half(data, 2) if has_minimum else d * F(q - 8))
    return values


def scalar_q5(data: bytes, has_minimum: bool) -> list[np.float32]:
    at = 4 if has_minimum else 2
    (high,) = struct.unpack_from("<I", data, at)
    d, quants = half(data, 0), data[at + 4 :]
    values = []
    for j in range(32):
        q = quants[j] & 0xF if j < 16 else quants[j - 16] >> 4
        q |= (high >> j & 1) << 4
        values.append(d * F(q) + half(data, 2) if has_minimum else d * F(q - 16))
    return values


def scalar_q8_0(data: bytes) -> list[np.float32]:
    return [half(data, 0) * F(q) for q in struct.unpack_from("<32b", data, 2)]


def six_bits(scales: bytes, j: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4: scale and minimum of group j."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (scales[j + 4] & 0xF) | (scales[j - 4] >> 6) << 4, (scales[j + 4] >> 4) | (scales[j] >> 6) << 4


def scalar_k(data: bytes, high: bytes | None) -> list[np.float32]:
    d, dmin, quants = half(data, 0), half(data, 2), data[16 if high is None else 48 :]
    values = []
    for index in range(256):
        group, place = divmod(index, 32)
        byte = quants[group // 2 * 32 + place]
        q = byte >> 4 if group % 2 else byte & 0xF
        if high is not None:
            q += 16 * (high[place] >> group & 1)
        scale, minimum = six_bits(data[4:16], group)
        values.append(d * F(scale) * F(q) - dmin * F(minimum))
    return values


def scalar_q6_k(data: bytes) -> list[np.float32]:
    low, high, d = data[:128], data[128:192], half(data, 208)
    scales = struct.unpack_from("<16b", data, 192)
    values = []
    for index in range(256):
        part, rest = divmod(index, 128)
        quarter, place = divmod(rest, 32)
        byte = low[64 * part + 32 * (quarter % 2) + place]
        nibble = byte >> 4 if quarter >= 2 else byte & 0xF
        q = (nibble | (high[32 * part + place] >> 2 * quarter & 3) << 4) - 32
        values.append(d * F(scales[index // 16]) * F(q))
    return values


SCALAR: dict[str, Any] = {
    "F32": lambda data: [F(struct.unpack("<f", data)[0])],
    "F16": lambda data: [half(data, 0)],
    "BF16": lambda data: [F(struct.unpack("<f", b"\0\0" + data)[0])],
    "Q4_0": lambda data: scalar_q4(data, False),
    "Q4_1": lambda data: scalar_q4(data, True),
    "Q5_0": lambda data: scalar_q5(data, False),
    "Q5_1": lambda data: scalar_q5(data, True),
    "Q8_0": scalar_q8_0,
    "Q4_K": lambda data: scalar_k(data, None),
    "Q5_K": lambda data: scalar_k(data, data[16:48]),
    "Q6_K": scalar_q6_k,
}


def test_the_reader_knows_these_types() -> None:
    assert {block.name for block in BLOCK_TYPES.values()} == SCALAR.keys()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_bytes_decode_as_the_format_says(kind: int, data: st.DataObject) -> None:
    block = BLOCK_TYPES[kind]
    blocks = data.draw(st.lists(st.binary(min_size=block.num_bytes, max_size=block.num_bytes), min_size=1, max_size=4))
    got = decode(block, np.frombuffer(b"".join(blocks), np.uint8))
    with np.errstate(all="ignore"):
        expected = np.array([value for part in blocks for value in SCALAR[block.name](part)], np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


def test_types_and_sizes_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {kind: block.name for kind, block in BLOCK_TYPES.items()}.items() <= theirs.items()
    assert UNREAD_TYPES.items() <= theirs.items()
    for kind, block in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (block.num_values, block.num_bytes)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_gguf_package_decodes_to_the_same_bits(kind: int) -> None:
    gguf = pytest.importorskip("gguf")
    block = BLOCK_TYPES[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (50, block.num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind)).reshape(-1)
    np.testing.assert_array_equal(decode(block, raw.reshape(-1)), theirs)
