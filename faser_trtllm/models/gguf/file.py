"""A GGUF file: its metadata, and its tensors as views of the mapped file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import CheckpointError, reason_of

MAGIC = b"GGUF"
_MIN_BYTES = 24  # MAGIC, the version and two counts
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
TensorType = GGMLQuantizationType
READ_TYPES = (
    TensorType.F32,
    TensorType.F16,
    TensorType.BF16,
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.Q5_0,
    TensorType.Q5_1,
    TensorType.Q8_0,
    TensorType.Q4_K,
    TensorType.Q5_K,
    TensorType.Q6_K,
    TensorType.MXFP4,
)
"""Supported types of tensors."""

_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_SCALARS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1")))
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
# Real headers hold some 500,000 strings in 20 MB; a damaged count must not fill memory.
_MAX_HEADER_BYTES = 256 << 20
_MAX_ELEMENTS = 1 << 22
_MAX_ENTRIES = 1 << 16
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file. shape: [out, in] for matrices, the reverse of the file's order. start: offset in bytes."""

    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int


class GgufFile(Closing):
    """An open GGUF file, whose header is checked against the file's size before use.

    metadata: numbers, strings, booleans, lists of strings and numpy arrays by key. A float32 becomes the shortest
    decimal that rounds to it, which recovers the number before conversion. tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header; CheckpointError if it is truncated, damaged or not supported."""
        self.path = path
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                magic = stream.read(4)
                if magic == MAGIC and size < _MIN_BYTES:
                    raise CheckpointError(
                        f"{path.name}: {size} bytes are a truncated GGUF file, whose header has {_MIN_BYTES}; fetch it "
                        "again"
                    )
                if magic != MAGIC:
                    raise CheckpointError(
                        f"{path.name}: {size} bytes that start with {magic!r} are no GGUF file, which starts with "
                        f"{MAGIC!r}; a checkpoint is a GGUF file or a Hugging Face folder"
                    )
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"the GGUF file {path} cannot be read: {reason_of(error)}") from error
        try:
            self.metadata, self.tensors = _Header(self._map, size, path.name).read()
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes as a read-only view of the file; KeyError if there is none."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.start)

    def close(self) -> None:
        """Unmap the file as soon as no array views it."""
        try:
            self._map.close()
        except BufferError:  # the mapping is freed with the last array that views it
            return


class _Header:
    """Reads the header; checks each count, length and offset against the file's size before it is used."""

    def __init__(self, mapping: mmap.mmap, size: int, file: str) -> None:
        self._map = mapping
        self._size = size
        self._end = min(size, _MAX_HEADER_BYTES)
        self._file = file
        self._position = len(MAGIC)
        self._elements_left = _MAX_ELEMENTS

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._integer("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in VERSIONS else f"version {version}"
            raise CheckpointError(
                f"{self._file}: the GGUF file is {what}, only versions 2 and 3, little-endian, are read"
            )
        num_tensors = self._count("tensors", 24)
        num_keys = self._count("metadata entries", 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._integer("<I"), key)
        if metadata.get("split.count", 0) not in (0, 1):
            raise CheckpointError(
                f"{self._file}: split.count is {metadata['split.count']}, only whole files are read; "
                "join the parts with llama-gguf-split --merge"
            )
        return metadata, self._tensors(num_tensors, self._alignment(metadata))

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}; it must be a power of two from 8 to {1 << 20}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for _ in range(count):
            name = self._string()
            if name in tensors:
                raise self._damaged(f"the tensor {name!r} occurs twice")
            num_dims = self._integer("<I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise self._damaged(f"tensor {name!r} has {num_dims} dimensions; it must have 1 to {_MAX_DIMS}")
            dims = [self._integer("<Q") for _ in range(num_dims)]
            kind, offset = self._integer("<I"), self._integer("<Q")
            found = next((known for known in TensorType if known == kind), None)
            if found is None or found not in READ_TYPES:
                raise CheckpointError(
                    f"{self._file}: tensor {name} is of type {found.name if found else 'unknown'} ({kind}), supported: "
                    f"{', '.join(known.name for known in READ_TYPES)}; take a file of one of these types"
                )
            block_values, block_bytes = GGML_QUANT_SIZES[found]
            num_values = 1
            for dim in dims:
                num_values *= dim
            if num_values == 0 or dims[0] % block_values:
                raise self._damaged(
                    f"tensor {name!r} has dimensions {dims}, none may be 0 and the first must be a multiple of "
                    f"{block_values} for {found.name}"
                )
            if offset != end:
                raise self._damaged(f"tensor {name!r} starts at {offset}, the one before it ends at {end}")
            num_bytes = num_values // block_values * block_bytes
            tensors[name] = GgufTensor(tuple(reversed(dims)), found, offset, num_bytes)
            end = _align(offset + num_bytes, alignment)
        base = _align(self._position, alignment)
        placed = {name: replace(tensor, start=base + tensor.start) for name, tensor in tensors.items()}
        needed = max((tensor.start + tensor.num_bytes for tensor in placed.values()), default=0)
        if needed > self._size:
            raise CheckpointError(
                f"{self._file}: {self._size} of {needed} bytes, the file is truncated or damaged; fetch it again"
            )
        return placed

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._damaged(f"the value of {key!r} is of type {kind}; the type must be from 0 to 12")
        value = np.frombuffer(self._take(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
        if kind == _BOOL:
            return bool(value)
        return float(str(value)) if kind == _FLOAT32 else value.item()

    def _array(self, key: str) -> Any:
        kind = self._integer("<I")
        if kind != _STRING and kind not in _SCALARS:
            raise self._damaged(f"the array {key!r} has elements of type {kind}, only numbers and strings are read")
        itemsize = 8 if kind == _STRING else np.dtype(_SCALARS[kind]).itemsize
        count = self._integer("<Q")
        if count > min((self._end - self._position) // itemsize, self._elements_left):
            raise self._damaged(
                f"the array {key!r} claims {count} elements at byte {self._position} of {self._size}, "
                f"all arrays together may have {_MAX_ELEMENTS}"
            )
        self._elements_left -= count
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return np.frombuffer(self._take(count * itemsize), _SCALARS[kind])

    def _count(self, what: str, min_bytes: int) -> int:
        count = self._integer("<Q")
        if count > min((self._end - self._position) // min_bytes, _MAX_ENTRIES):
            raise self._damaged(f"it claims {count} {what} in {self._size} bytes, at most {_MAX_ENTRIES} are read")
        return count

    def _integer(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _string(self) -> str:
        data = self._take(self._integer("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a string before byte {self._position} is not UTF-8") from error

    def _take(self, num_bytes: int) -> bytes:
        start = self._position
        if num_bytes > self._end - start:
            raise self._damaged(
                f"{num_bytes} bytes are needed at byte {start} of {self._size}, headers have at most "
                f"{_MAX_HEADER_BYTES}"
            )
        self._position = start + num_bytes
        return self._map[start : self._position]

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: the GGUF header is damaged or cut off ({why}); fetch the file again")


def _align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment
