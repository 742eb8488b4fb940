"""A safetensors file whose tensors are views of the mapped file, also for types that numpy does not have."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from faser_trtllm.core.closing import Closing
from faser_trtllm.json_text import parse_json

__all__ = ["Entry", "SafetensorError", "SafetensorsFile"]

MAX_DIMS = 32
MAX_ELEMENTS = 1 << 59
MAX_HEADER_BYTES = 8 << 20  # enough for some 70,000 tensors; larger checkpoints have several files


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's type as named by safetensors, its shape, and its offset in the file in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile(Closing):
    """A mapped safetensors file. entries: tensors by name. metadata: strings by key."""

    def __init__(self, path: Path) -> None:
        """Map a file; OSError if it cannot be read, SafetensorError if its header is damaged or does not fit it."""
        with path.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
            if num_bytes > MAX_HEADER_BYTES:
                raise SafetensorError(f"a header of {num_bytes} bytes, at most {MAX_HEADER_BYTES} are read")
            with safe_open(path, "numpy"):  # checks the header, but accepts two tensors of one name
                self._mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        data_start = 8 + num_bytes
        try:
            header = parse_json(self._mapping[8:data_start], unique_names=True)
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self.entries = {
                name: Entry(info["dtype"], _shape(name, info["shape"]), data_start + info["data_offsets"][0])
                for name, info in header.items()
            }
        except ValueError as error:
            self._mapping.close()
            raise SafetensorError(f"the header cannot be read: {error}") from error

    def array(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a tensor as a read-only view of the file, reinterpreted as dtype; KeyError if there is none."""
        entry = self.entries[name]
        return np.frombuffer(self._mapping, dtype, math.prod(entry.shape), entry.start).reshape(entry.shape)

    def close(self) -> None:
        """Unmap the file as soon as no array views it."""
        try:
            self._mapping.close()
        except BufferError:  # the mapping is freed with the last array that views it
            return


def _shape(name: str, sizes: list[int]) -> tuple[int, ...]:
    """Return the shape; ValueError if numpy cannot hold it, which a tensor without elements may declare."""
    if len(sizes) > MAX_DIMS or math.prod(max(size, 1) for size in sizes) > MAX_ELEMENTS:
        raise ValueError(f"tensor {name} has {len(sizes)} dimensions, or more elements than an array can")
    return tuple(sizes)
