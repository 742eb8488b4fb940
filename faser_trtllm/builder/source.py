"""The checkpoints that engines are built from: opening, checking, and recognising unchanged files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import sha256_of
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.vocabulary import ResizedVocabulary, resize_vocabulary
from faser_trtllm.models.weights import INDEX_FILE, CheckpointWeights, Weights, check_weights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HASHED_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, INDEX_FILE)


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One opened checkpoint with build options applied. segments: layer boundaries, 0 and num_layers included.

    files: names of the checkpoint's files that the engine depends on.
    """

    role: str
    directory: Path
    config: ModelConfig
    weights: Weights
    segments: tuple[int, ...]
    files: tuple[str, ...]

    def stats(self) -> dict[str, dict[str, Any]]:
        """{file: {"bytes", "mtime_ns", "inode"}}: enough to detect a changed file."""
        stats = {name: (self.directory / name).stat() for name in self.files}
        return {
            name: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
            for name, stat in stats.items()
        }

    def is_same(self, recorded: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a manifest's entry for this role, with "sha256" per file, matches these files."""
        return self.first_difference(recorded) is None

    def first_difference(self, recorded: Mapping[str, Mapping[str, Any]]) -> str | None:
        """The first file that differs from a manifest's entry for this role, or None."""
        stats = self.stats()
        for name in sorted(stats.keys() ^ recorded.keys()):
            return name
        for name, stat in stats.items():
            # An untouched file need not be read again, which takes minutes for large checkpoints.
            untouched = all(recorded[name].get(key) == value for key, value in stat.items())
            if not untouched and recorded[name].get("sha256") != sha256_of(self.directory / name):
                return name
        return None


def open_sources(
    target_dir: Path, draft_dir: Path | None, expand: int, exit_layers: Sequence[int], stack: ExitStack
) -> list[Source]:
    """Open the target and the draft, if any; closed with the stack.

    Raises CheckpointError, and InvalidArgumentError for exit_layers.
    """
    target = _open_target(target_dir, expand, exit_layers, stack)
    sources = [target]
    if draft_dir is not None:
        sources.append(_open_draft(draft_dir, target.config.vocab_size, stack))
    _check_tokenizers(sources)
    return sources


def _open_target(directory: Path, expand: int, exit_layers: Sequence[int], stack: ExitStack) -> Source:
    config, checkpoint = _open_checkpoint("target", directory, stack)
    config = expand_config(config, expand)
    weights = ExpandedWeights(checkpoint, expand)
    segments = _segments(tuple(exit_layers), config.num_layers)
    return Source("target", directory, config, weights, segments, _files(directory, checkpoint))


def _open_draft(directory: Path, vocab_size: int, stack: ExitStack) -> Source:
    config, checkpoint = _open_checkpoint("draft", directory, stack)
    weights: Weights = checkpoint
    if config.vocab_size != vocab_size:
        config, weights = resize_vocabulary(config, vocab_size), ResizedVocabulary(checkpoint, vocab_size)
    return Source("draft", directory, config, weights, (0, config.num_layers), _files(directory, checkpoint))


def _open_checkpoint(role: str, directory: Path, stack: ExitStack) -> tuple[ModelConfig, CheckpointWeights]:
    if not os.path.isdir(directory):
        raise CheckpointError(f"the {role} checkpoint {directory} is not a directory that can be read")
    config = load_model_config(directory)
    checkpoint = stack.enter_context(CheckpointWeights(directory))
    check_weights(checkpoint, config)
    return config, checkpoint


def _files(directory: Path, checkpoint: CheckpointWeights) -> tuple[str, ...]:
    return (*checkpoint.files, *(name for name in _HASHED_FILES if (directory / name).exists()))


def _segments(exit_layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    for layer in exit_layers:
        if not 0 < layer < num_layers:
            raise InvalidArgumentError(
                f"exit_layers has {layer}, boundaries lie between 1 and {num_layers - 1} in a model of "
                f"{num_layers} layers"
            )
    if len(set(exit_layers)) != len(exit_layers):
        raise InvalidArgumentError(f"exit_layers {list(exit_layers)} names a layer twice")
    return (0, *sorted(exit_layers), num_layers)


def _check_tokenizers(sources: list[Source]) -> None:
    tokenizers = [Tokenizer.load(source.directory) for source in sources]
    if len(sources) == 1:
        return
    difference = tokenizers[0].first_difference(tokenizers[1], names=("the target", "the draft"))
    if difference is not None:
        raise CheckpointError(f"target and draft must share one tokenizer, but {difference}")
