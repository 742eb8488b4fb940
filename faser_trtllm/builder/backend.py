"""The builder interface of a backend; faser_trtllm/backends.py maps backends to implementations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.source import Source


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int, phase: str = "") -> None:
        """what: the model ("target", "draft"); done of total units are; phase: a description of the current work."""


class EngineBuilder(Protocol):
    """Not thread-safe."""

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        """The size of a KV block; InvalidArgumentError if `wanted` is not supported."""

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        """The backend's entries in the manifest, besides options and checkpoints; if they differ, so do the engines."""

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        """The backend's own entries under "faser" in an engine's config.json."""

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        """Lower bound on the bytes that an engine takes on disk."""

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        """Write one engine file; FaserError if it cannot be built, OSError from the file system."""
