"""Open and check the checkpoints that engines are built from, and recognize unchanged files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import sha256_of
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from faser_trtllm.models.checkpoint.checkpoint import Checkpoint
from faser_trtllm.models.checkpoint.open import open_checkpoint
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.heads.block import BlockWeights, is_block, load_block_config
from faser_trtllm.models.heads.eagle3 import Eagle3Weights, is_eagle3, load_eagle3_config
from faser_trtllm.models.heads.head import BlockDrafter, Eagle3Head, Head, MedusaHeads, MtpLayer
from faser_trtllm.models.heads.medusa import MedusaWeights, is_medusa, load_medusa_config
from faser_trtllm.models.heads.mtp import MtpWeights, load_mtp_config
from faser_trtllm.models.heads.torch_file import HeadFiles, open_head_files
from faser_trtllm.models.heads.unsupported import check_draft_folder
from faser_trtllm.models.vocabulary import (
    MappedVocabulary,
    ResizedVocabulary,
    VocabularyMap,
    map_config,
    map_vocabulary,
    resize_vocabulary,
)
from faser_trtllm.models.weights import Weights

# Storage types that an engine holds without rounding, by its dtype.
_SAME_TYPES = {"bfloat16": {"BF16", "MXFP4"}, "float16": {"F16"}, "float32": {"F32", "F16", "BF16"}}
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One opened checkpoint with build options applied.

    config, weights: with the options applied; for Medusa heads, which are no decoder, the target's.
    segments: layer boundaries, including 0 and num_layers.
    head: set if the draft is a head.
    read_layers: set for the target: layers whose inputs the draft head reads, ascending; num_layers: the last output.
    vocabulary: set for a draft model whose tokenizer differs from the target's.
    """

    role: str
    checkpoint: Checkpoint
    config: ModelConfig
    weights: Weights
    segments: tuple[int, ...]
    head: Head | None = None
    read_layers: tuple[int, ...] = ()
    vocabulary: VocabularyMap | None = None

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return {file: {"bytes", "mtime_ns", "inode"}}, which differ if a file has changed; OSError."""
        stats = {name: path.stat() for name, path in self.checkpoint.files.items()}
        return {
            name: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
            for name, stat in stats.items()
        }

    def rounding(self, dtype: str) -> str | None:
        """Return a sentence if an engine of this dtype rounds the checkpoint's matrices, or None."""
        rounded = [name for name in self.checkpoint.stored_types if name not in _SAME_TYPES[dtype]]
        if not rounded:
            return None
        return (
            f"{self.role}: {', '.join(rounded)} weights become {dtype}, which keeps {_SIGNIFICANT_BITS[dtype]} "
            "significant bits"
        )

    @property
    def draft_window(self) -> int | None:
        """Context length of a draft model in tokens, None for other sources.

        A head has no such limit: its rope is relative, and published heads declare the length of their training.
        """
        return self.config.max_position_embeddings if self.role == "draft" and self.head is None else None

    def unreachable_ends(self) -> str | None:
        """Return a sentence if the target has no rows for some end tokens of the tokenizer, else None."""
        tokenizer = self.checkpoint.tokenizer
        found = ", ".join(f"{tokenizer.token(i)!r} ({i})" for i in tokenizer.unreachable_end_ids)
        if not found or self.role != "target":
            return None
        return f"no text ends with {found}: the model's ids are 0 to {self.config.vocab_size - 1}"

    def is_same(self, recorded: Mapping[str, Mapping[str, Any]]) -> bool:
        """Return True if a manifest's entry for this role, with "sha256" per file, matches these files."""
        return self.first_difference(recorded) is None

    def first_difference(self, recorded: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return the name of the first file that differs from a manifest's entry for this role, or None."""
        stats = self.stats()
        for name in sorted(stats.keys() ^ recorded.keys()):
            return name
        for name, stat in stats.items():
            # Hashing a large checkpoint takes minutes, so an untouched file is not read.
            untouched = all(recorded[name].get(key) == value for key, value in stat.items())
            if not untouched and recorded[name].get("sha256") != sha256_of(self.checkpoint.files[name]):
                return name
        return None


def open_sources(
    target: Path,
    draft: Path | None,
    expand: int,
    exit_layers: Sequence[int],
    stack: ExitStack,
    tokenizer_dir: Path | None = None,
    eagle3_layers: Sequence[int] = (),
    mtp: bool = False,
    mtp_reads_normed: bool = False,
    block_slots: str = "",
    min_vocab_overlap: float = 1.0,
    eagle3_norm_output: str = "",
) -> list[Source]:
    """Open the checkpoints: return the target's source and the draft's, if any. The stack closes them.

    The parameters from expand on are fields of BuildOptions. Raises CheckpointError, and InvalidArgumentError for
    exit_layers, eagle3_layers, eagle3_norm_output and block_slots.
    """
    sources = [_open_target(_open("target", target, stack, tokenizer_dir), expand, exit_layers)]
    has_config = draft is not None and (draft / "config.json").exists()
    if draft is not None and has_config:
        check_draft_folder(draft)
    has_block = draft is not None and has_config and is_block(draft)
    is_head = draft is not None and has_config and is_eagle3(draft)
    if eagle3_layers and not is_head and not has_block:
        raise InvalidArgumentError(
            f"eagle3_layers is {','.join(map(str, eagle3_layers))}, but the draft checkpoint is no EAGLE-3 head and no "
            "block drafter; leave it out"
        )
    if block_slots and not has_block:
        raise InvalidArgumentError(
            f"block_slots is {block_slots}, but the draft checkpoint is no block drafter; leave it out"
        )
    if eagle3_norm_output and not is_head:
        raise InvalidArgumentError(
            f"eagle3_norm_output is {eagle3_norm_output}, but the draft checkpoint is no EAGLE-3 head; leave it out"
        )
    if mtp:
        sources.append(_open_mtp(sources[0], mtp_reads_normed))
    elif draft is not None and has_block:
        sources.append(_open_block(draft, sources[0], eagle3_layers, block_slots, stack))
    elif draft is not None and is_head:
        sources.append(_open_eagle3(draft, sources[0], eagle3_layers, eagle3_norm_output, stack))
    elif draft is not None and has_config and is_medusa(draft):
        sources.append(_open_medusa(draft, sources[0], stack))
    elif draft is not None:
        sources.append(_open_draft(_open("draft", draft, stack, tokenizer_dir), sources[0], min_vocab_overlap))
    head = sources[-1].head
    if head is not None:
        sources[0] = dataclasses.replace(sources[0], read_layers=_read_layers(head, sources[0].config.num_layers))
    return sources


def _read_layers(head: Head, num_layers: int) -> tuple[int, ...]:
    return head.config.layers if isinstance(head, Eagle3Head | BlockDrafter) else (num_layers,)


def _open(role: str, path: Path, stack: ExitStack, tokenizer_dir: Path | None) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"the {role} checkpoint {path} does not exist or cannot be read")
    return open_checkpoint(path, stack, tokenizer_dir)


def _open_target(checkpoint: Checkpoint, expand: int, exit_layers: Sequence[int]) -> Source:
    config = expand_config(checkpoint.config, expand)
    weights = ExpandedWeights(checkpoint.weights, expand)
    return Source("target", checkpoint, config, weights, segment_bounds(exit_layers, config.num_layers))


def _open_draft(checkpoint: Checkpoint, target: Source, min_overlap: float) -> Source:
    config, weights, vocab_size = checkpoint.config, checkpoint.weights, target.config.vocab_size
    vocabulary = _map_tokenizer(checkpoint, target, min_overlap)
    if vocabulary is not None:
        weights = MappedVocabulary(weights, vocabulary, config.tie_word_embeddings)
        config = map_config(config, vocabulary)
    elif config.vocab_size != vocab_size:
        config, weights = resize_vocabulary(config, vocab_size), ResizedVocabulary(weights, vocab_size)
    return Source("draft", checkpoint, config, weights, (0, config.num_layers), vocabulary=vocabulary)


def _map_tokenizer(draft: Checkpoint, target: Source, min_overlap: float) -> VocabularyMap | None:
    """Return a map of the draft's tokens, None if the tokenizers are equal; CheckpointError if too few are common."""
    own, others = target.checkpoint.tokenizer, draft.tokenizer
    difference = own.first_difference(others, names=("the target", "the draft"))
    if difference is None:
        return None
    found = map_vocabulary(own, target.config.vocab_size, others, draft.config.vocab_size)
    if found is None or found.overlap < min_overlap:
        common = found or "none of the target's tokens"
        raise CheckpointError(
            f"target and draft have different tokenizers ({difference}), and the draft has {common}, min_vocab_overlap "
            f"is {100 * min_overlap:.4g} %; take a draft with the target's tokenizer, or set a lower "
            "--min_vocab_overlap"
        )
    return found


def _open_eagle3(directory: Path, target: Source, layers: Sequence[int], norm_output: str, stack: ExitStack) -> Source:
    files = open_head_files(directory, stack)
    weights = Eagle3Weights(files, target.weights)
    config = load_eagle3_config(directory, weights, target.checkpoint.config, layers, norm_output)
    expand = target.config.num_layers // target.checkpoint.config.num_layers
    config = dataclasses.replace(config, layers=tuple(layer * expand for layer in config.layers))
    head = Eagle3Head(config, weights.target_ids(config.draft_vocab_size, config.model.vocab_size))
    checkpoint = _head_checkpoint(directory, files, config.model, weights, target)
    return Source("draft", checkpoint, config.model, weights, (0, config.model.num_layers), head)


def _open_block(directory: Path, target: Source, layers: Sequence[int], slots: str, stack: ExitStack) -> Source:
    files, of_target = open_head_files(directory, stack), target.checkpoint.config
    weights = BlockWeights(files, target.weights, of_target.tie_word_embeddings)
    config = load_block_config(directory, weights, of_target, layers, slots)
    expand = target.config.num_layers // of_target.num_layers
    config = dataclasses.replace(config, layers=tuple(layer * expand for layer in config.layers))
    checkpoint = _head_checkpoint(directory, files, config.model, weights, target)
    return Source("draft", checkpoint, config.model, weights, (0, config.model.num_layers), BlockDrafter(config))


def _open_medusa(directory: Path, target: Source, stack: ExitStack) -> Source:
    files = open_head_files(directory, stack)
    weights = MedusaWeights(files)
    head = MedusaHeads(load_medusa_config(directory, weights, target.config), weights)
    # Medusa heads are dense and have no attention.
    config = dataclasses.replace(
        target.config, num_layers=1, windows=(0,), norms_all_heads=False, has_sinks=False, experts=None
    )
    checkpoint = _head_checkpoint(directory, files, config, target.weights, target)
    return Source("draft", checkpoint, config, target.weights, (0, 1), head)


def _open_mtp(target: Source, reads_normed: bool) -> Source:
    of_target = target.checkpoint
    weights = MtpWeights(of_target.weights, of_target.config.tie_word_embeddings)
    config = load_mtp_config(
        of_target.path, weights, of_target.config, target.config.num_layers, reads_normed=reads_normed
    )
    checkpoint = dataclasses.replace(of_target, config=config.model, weights=weights, tokenizer_files={})
    return Source("draft", checkpoint, config.model, weights, (0, 1), MtpLayer(config, weights))


def _head_checkpoint(
    directory: Path, files: HeadFiles, config: ModelConfig, weights: Weights, target: Source
) -> Checkpoint:
    """Return a head's checkpoint, which has no tokenizer of its own."""
    types = sorted({files.dtype(name) for name in files if len(files.shape(name)) > 1})
    paths = {name: directory / name for name in (*files.files, "config.json")}
    return Checkpoint(directory, config, weights, target.checkpoint.tokenizer, {}, paths, tuple(types))


def segment_bounds(exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the boundaries of segments cut at exit_layers (any order), including 0 and num_layers.

    Raises InvalidArgumentError for a wrong cut.
    """
    for layer in exit_layers:
        if not 0 < layer < num_layers:
            raise InvalidArgumentError(
                f"exit_layers has {layer}, boundaries lie between 1 and {num_layers - 1} in a model of "
                f"{num_layers} layers"
            )
    if len(set(exit_layers)) != len(exit_layers):
        raise InvalidArgumentError(f"exit_layers {list(exit_layers)} names a layer twice")
    return (0, *sorted(exit_layers), num_layers)
