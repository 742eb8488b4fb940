"""A safetensors file whose tensors are views of the mapped file, so that numpy reads types that it does not have."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from faser_trtllm.core.closing import Closing

__all__ = ["Entry", "SafetensorError", "SafetensorsFile"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's type as safetensors names it, its shape, and where it starts in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile(Closing):
    """entries: by the tensors' names. metadata: strings by key."""

    def __init__(self, path: Path) -> None:
        """Map a file; OSError if it cannot be read, SafetensorError if its header is damaged or does not fit it."""
        with path.open("rb") as stream, safe_open(path, "numpy"):  # which checks the header
            self._mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        data_start = 8 + int.from_bytes(self._mapping[:8], "little")
        header = json.loads(self._mapping[8:data_start])
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries = {
            name: Entry(info["dtype"], tuple(info["shape"]), data_start + info["data_offsets"][0])
            for name, info in header.items()
        }

    def array(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A tensor as a read-only view of the file, its bits taken for this type; KeyError if there is none."""
        entry = self.entries[name]
        return np.frombuffer(self._mapping, dtype, math.prod(entry.shape), entry.start).reshape(entry.shape)

    def close(self) -> None:
        """Unmap the file as soon as no array views it."""
        try:
            self._mapping.close()
        except BufferError:  # the last array that views it frees it
            return
