"""What a backend does for `faser build`: one implementation writes CPU engines, one TensorRT's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.source import Source


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int, phase: str = "") -> None:
        """what: the model ("target", "draft"); done of total units are; phase: what is done right now, in words."""


class Backend(Protocol):
    """Not thread-safe."""

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        """The size of a KV block; InvalidArgumentError where `wanted` cannot be."""

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        """What the manifest says of these engines beyond options and checkpoints: other values, other engines."""

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        """What an engine's config.json says under "faser" beyond what all backends do."""

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        """Bytes that an engine takes on disk at the least."""

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        """Write one engine file; FaserError where it cannot be built, OSError as the file system does."""
