"""Convert between numpy arrays and the addresses that native functions take."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.native.structures import FaserSampling

Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
SamplingArray = npt.NDArray[np.void]

# One element per slot: struct faser_sampling, field by field.
SAMPLING_DTYPE = np.dtype(FaserSampling)

_INT32 = np.dtype(np.int32)
_address, _buffer = ctypes.addressof, ctypes.c_char.from_buffer


def address_of(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> int:
    """Return the address of a C-contiguous array's first element; raise TypeError or ValueError for other arrays."""
    if array.dtype is not dtype and array.dtype != dtype:
        raise TypeError(f"expected an array of {np.dtype(dtype).name}, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a C-contiguous array, got strides {array.strides} for shape {array.shape}")
    # ctypes is slow with structured arrays, so take the address of their bytes.
    return native.address_of_buffer(array.view(np.uint8) if array.dtype.names else array)


def int32_addresses(*columns: Int32Array) -> list[int]:
    """Return the addresses of C-contiguous int32 arrays; faster than address_of(), with the same errors."""
    return [
        _address(_buffer(column))  # type: ignore[arg-type]
        if column.dtype is _INT32 and column.size
        else address_of(column, np.int32)
        for column in columns
    ]


_last_table: tuple[Callable[[], Any], int] = (lambda: None, 0)  # one tuple, since threads share it


def sampling_address(sampling: SamplingArray) -> int:
    """Return the address of a sampling table (SAMPLING_DTYPE). The last one is cached, since a table never moves and
    numpy is slow to give a structured array's address."""
    global _last_table
    known, address = _last_table
    if known() is not sampling:
        address = address_of(sampling, SAMPLING_DTYPE)
        _last_table = weakref.ref(sampling), address
    return address


def logits_layout(logits: Float32Array, vocab_size: int) -> tuple[int, int]:
    """Return address and row stride, in numbers, of logits [num_rows, >= vocab_size], whose rows must be contiguous."""
    if logits.dtype != np.float32:
        raise TypeError(f"expected logits of float32, got {logits.dtype}")
    if logits.ndim != 2 or logits.shape[1] < vocab_size:
        raise ValueError(f"expected logits [num_rows, >= {vocab_size}], got shape {logits.shape}")
    row_bytes, item_bytes = logits.strides
    if logits.size and (item_bytes != 4 or row_bytes % 4):
        raise ValueError(f"expected logits with contiguous rows, got strides {logits.strides}")
    stride = row_bytes // 4 if logits.shape[0] > 1 else logits.shape[1]
    return native.address_of_buffer(logits), stride


def int32_at(address: int, count: int) -> Int32Array:
    """Return a view of int32 memory; empty if the address is null."""
    if not address or count <= 0:
        return np.zeros(0, np.int32)
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def int8_at(address: int, count: int) -> Int8Array:
    """Return a view of int8 memory; empty if the address is null."""
    if not address or count <= 0:
        return np.zeros(0, np.int8)
    return np.ctypeslib.as_array((ctypes.c_int8 * count).from_address(address))


def float32_at(address: int, count: int) -> Float32Array:
    """Return a view of float memory; empty if the address is null."""
    if not address or count <= 0:
        return np.zeros(0, np.float32)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
