"""The builder interface of a backend; faser_trtllm/backends.py maps backends to implementations."""

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
        """Report that done of total units of a model ("target", "draft") are finished; phase: the current work."""


class EngineBuilder(Protocol):
    """A builder of one backend's engine files. Not thread-safe."""

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        """Return the size of a KV block; InvalidArgumentError if `wanted` is not supported."""

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        """Return the manifest's entries, next to options and checkpoints, that decide if engines are up to date."""

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        """Return the backend's entries under "faser" in an engine's config.json."""

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        """Return a lower bound on an engine's bytes on disk."""

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        """Write one engine file; FaserError if it cannot be built, OSError from the file system."""


def paged_block_size(wanted: int | None) -> int:
    """Return EngineBuilder.tokens_per_block for paged KV caches."""
    size = DEFAULT_TOKENS_PER_BLOCK if wanted is None else wanted
    if size < 16 or size % 16:
        raise InvalidArgumentError(f"tokens_per_block is {size}; it must be a multiple of 16")
    return size


def tensor_progress(role: str, total: int, progress: Progress | None) -> Callable[[str], None]:
    """Return a callback that reports progress when it is called with the name of each written tensor."""
    done = itertools.count(1)

    def on_tensor(name: str) -> None:
        if progress is not None:
            progress(role, next(done), total)

    return on_tensor
