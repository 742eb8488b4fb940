"""Weights of a checkpoint, read tensor by tensor from memory-mapped safetensors files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import CheckpointError, reason_of
from faser_trtllm.models.config import ModelConfig, read_json
from faser_trtllm.models.fp8 import Float32Array, Fp8Matrix
from faser_trtllm.models.fused import fused_tensors
from faser_trtllm.models.safetensors_file import Entry, SafetensorError, SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FP8 = "F8_E4M3"
_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}

Bfloat16Array = npt.NDArray[np.uint16]
Dtype = type[np.uint16] | type[np.float32]
"""The type that a tensor is read as: np.uint16 for bf16 bits, or np.float32."""


def bfloat16_from_float32(values: Float32Array) -> Bfloat16Array:
    """Round fp32 to bf16 bits, ties to even; NaN stays NaN, overflow becomes infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    halves = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded: Bfloat16Array = halves.astype(np.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def float32_from_bfloat16(bits: Bfloat16Array) -> Float32Array:
    """Convert bf16 bits to fp32, exactly."""
    values: Float32Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def converted(values: Float32Array, dtype: Dtype) -> npt.NDArray[Any]:
    """Return fp32 values unchanged, or rounded to bf16 bits if dtype is np.uint16."""
    return bfloat16_from_float32(values) if dtype is np.uint16 else values


class Weights:
    """A model's tensors by their Hugging Face names, read from a checkpoint or derived from one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; CheckpointError if there is none of this name."""
        raise NotImplementedError

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        """Return a tensor that shape() knows, as bf16 bits (np.uint16) or fp32 (np.float32)."""
        raise NotImplementedError

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        """Return a matrix as stored; None unless it is in e4m3 with one scale, or one per output."""
        return None

    def input_scale(self, module: str) -> float | None:
        """Return the static scale of a matrix's inputs, None if there is none. module: its name without .weight."""
        return None

    def bfloat16(self, name: str, shape: tuple[int, ...]) -> Bfloat16Array:
        """Return a tensor as bf16 bits, a view of the file if stored as such; CheckpointError if the shape differs."""
        check_shapes(self, {name: shape})
        return self.read(name, np.uint16)

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        check_shapes(self, {name: shape})
        return self.read(name, np.float32)


def check_shapes(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for the first tensor that is missing or has another shape."""
    for name, shape in shapes.items():
        found = weights.shape(name)
        if found != shape:
            stored = weights.source(name)[1] if isinstance(weights, DerivedWeights) else name
            raise CheckpointError(f"tensor {stored} has shape {list(found)}, the configuration asks for {list(shape)}")


class DerivedWeights(Weights):
    """Tensors of other weights under new names; subclasses define source()."""

    def source(self, name: str) -> tuple[Weights, str]:
        """Return the weights that hold a tensor, and its name there; CheckpointError if there is none of this name."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        weights, name = self.source(name)
        return weights.shape(name)

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        weights, name = self.source(name)
        return weights.read(name, dtype)


class CheckpointWeights(Weights, Closing):
    """Tensors of one checkpoint by their Hugging Face names. Files are memory-mapped, never read whole."""

    def __init__(self, directory: Path) -> None:
        """Map the checkpoint's files; CheckpointError if one is missing, truncated or damaged."""
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, str] = {}
        with ExitStack() as guard:
            for file in _weight_files(directory):
                self._files[file] = opened = guard.enter_context(self._open(file))
                for name in opened.entries:
                    if name in self._file_of:
                        raise CheckpointError(f"tensor {name} is in both {self._file_of[name]} and {file}")
                    self._file_of[name] = file
            guard.pop_all()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        return self._read(name, self._array(name, _DTYPES), dtype)

    def part(self, name: str, index: int, dtype: Dtype) -> npt.NDArray[Any]:
        """Read element `index` of a tensor [n, ...], without reading the others."""
        return self._read(name, self._array(name, _DTYPES)[index], dtype)

    def uint8(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor of bytes of any shape, a read-only view of the file."""
        return self._array(name, {"U8": "u1"})

    def int32(self, name: str) -> npt.NDArray[np.int32]:
        """Return an int32 tensor of any shape, a read-only view of the file."""
        return self._array(name, {"I32": "<i4"})

    def fp8(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bits of an e4m3 tensor of any shape, a read-only view of the file."""
        return self._array(name, {FP8: "u1"})

    def dtype(self, name: str) -> str:
        """Return a tensor's type as named by safetensors; CheckpointError if there is none of this name."""
        return self._entry(name).dtype

    def are_equal(self, one: str, other: str) -> bool:
        """Return True if two tensors have the same type, shape and values."""
        first, second = self._entry(one), self._entry(other)
        if first.dtype not in _DTYPES or (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        a, b = self._array(one, _DTYPES).reshape(-1), self._array(other, _DTYPES).reshape(-1)
        step = 1 << 20  # values per comparison, to bound memory
        return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.size, step))

    def integers(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        check_shapes(self, {name: shape})
        return self._array(name, _INTEGERS).astype(np.int64)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold the tensors."""
        return tuple(self._files)

    def close(self) -> None:
        """Unmap the files as soon as no array views them."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._file_of.clear()

    def _entry(self, name: str) -> Entry:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name} is missing in the checkpoint {self.directory}")
        return self._files[self._file_of[name]].entries[name]

    def _read(self, name: str, array: npt.NDArray[Any], dtype: Dtype) -> npt.NDArray[Any]:
        if self.dtype(name) != "BF16":
            return converted(array.astype(np.float32), dtype)
        return array if dtype is np.uint16 else float32_from_bfloat16(array)

    def _array(self, name: str, dtypes: Mapping[str, npt.DTypeLike]) -> npt.NDArray[Any]:
        dtype = self._entry(name).dtype
        if dtype not in dtypes:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} is of type {dtype}; it must be {' or '.join(dtypes)}"
            )
        return self._files[self._file_of[name]].array(name, dtypes[dtype])

    def _open(self, file: str) -> SafetensorsFile:
        path = self.directory / file
        try:
            return SafetensorsFile(path)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: {path.stat().st_size} bytes are a truncated or damaged safetensors file ({error}); fetch it "
                "again"
            ) from error
        except (OSError, ValueError) as error:  # the index may have a name that no file can have
            raise CheckpointError(f"{file:.80} cannot be read in {self.directory}: {reason_of(error)}") from error


def _weight_files(directory: Path) -> list[str]:
    if not directory.is_dir():
        raise CheckpointError(f"the checkpoint {directory} is not a directory")
    if (directory / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(
            f"the checkpoint {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; convert other files to "
            "safetensors (transformers: from_pretrained, then save_pretrained)"
        )
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_FILE}: weight_map is missing")
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{INDEX_FILE}: {file!r} is not the name of a file next to it")
    return files


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name: shape} of every tensor of a model; matrices are [out, in]."""
    sizes = dataclasses.asdict(config) | {"tied": config.tie_word_embeddings}
    return {name: shape for parts in fused_tensors(sizes).values() for name, shape in parts}
