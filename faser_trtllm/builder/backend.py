"""The interface that a backend implements to build engines; faser_trtllm/backends.py names the implementations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.source import Source
from faser_trtllm.errors import InvalidArgumentError

DEFAULT_TOKENS_PER_BLOCK = 32


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int, phase: str = "") -> None:
        """Report that `done` of `total` units are finished. what: "target" or "draft". phase: the current work."""


class EngineBuilder(Protocol):
    """A builder of one backend's engine files. Not thread-safe."""

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        """Return the tokens of a KV block. wanted: None for the default; InvalidArgumentError if not supported."""

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        """Return manifest entries that decide if engines are up to date; InvalidArgumentError for a wrong source."""

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        """Return the backend's entries under "faser" in an engine's config.json."""

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        """Return a lower bound on the size of an engine file in bytes."""

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        """Write one engine file; FaserError if it cannot be built, OSError from the file system."""


def paged_block_size(wanted: int | None) -> int:
    """Return the tokens of a paged cache's block, 32 by default; InvalidArgumentError unless a multiple of 16."""
    size = DEFAULT_TOKENS_PER_BLOCK if wanted is None else wanted
    if size < 16 or size % 16:
        raise InvalidArgumentError(f"tokens_per_block is {size}; it must be a multiple of 16")
    return size


def tensor_progress(role: str, total: int, progress: Progress | None) -> Callable[[str], None]:
    """Return a callback for the name of each written tensor, which reports progress. role: "target" or "draft"."""
    done = itertools.count(1)

    def on_tensor(name: str) -> None:
        if progress is not None:
            progress(role, next(done), total)

    return on_tensor
