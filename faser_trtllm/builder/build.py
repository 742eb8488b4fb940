"""`faser build`: build an engine directory from checkpoints, atomically."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from faser_trtllm import __version__
from faser_trtllm.backends import find_backend, names_with
from faser_trtllm.builder.backend import EngineBuilder, Progress
from faser_trtllm.builder.engine_config import engine_config
from faser_trtllm.builder.engine_dir import (
    CONFIG_FILE,
    ENGINE_FILE,
    MANIFEST_FILE,
    MANIFEST_FORMAT,
    BuildConfig,
    EngineDir,
    sha256_of,
)
from faser_trtllm.builder.interrupts import kept_interrupts
from faser_trtllm.builder.network.fp8_recipe import describe_fp8
from faser_trtllm.builder.options import DEFAULT_DRAFT_LEN, MAX_DRAFT_LEN, BuildOptions, check_options, fp8_roles
from faser_trtllm.builder.source import Source, open_sources
from faser_trtllm.builder.staging import remove_leftovers, staged_directory
from faser_trtllm.errors import CheckpointError, EngineFileError, InvalidArgumentError, reason_of
from faser_trtllm.models.heads.head import BlockDrafter, MedusaHeads

__all__ = ["BuildOptions", "Progress", "build_engines"]

DEFAULT_MAX_SEQ_LEN = 4096


def build_engines(
    options: BuildOptions, progress: Progress | None = None, note: Callable[[str], None] | None = None
) -> EngineDir | None:
    """Build engines, unless output_dir already holds them; return None after a dry run, which writes nothing.

    note: called with a sentence about rounded weights, a checkpoint that contradicts itself, end tokens without rows,
    and a draft that covers only a part of the vocabulary or of max_seq_len.

    Raises InvalidArgumentError for options, CheckpointError for checkpoints, ConfigError without the backend's
    libraries, and EngineFileError if output_dir cannot be written or must not be replaced; it is then unchanged.
    """
    check_options(options)
    with ExitStack() as stack:
        backend: EngineBuilder = resolve_name(find_backend(options.backend).builder)(options)
        sources = open_sources(
            options.checkpoint_dir,
            options.draft_checkpoint_dir,
            options.expand,
            options.exit_layers,
            stack,
            options.tokenizer_dir,
            options.eagle3_layers,
            options.mtp,
            options.mtp_reads_normed,
            options.block_slots,
            options.min_vocab_overlap,
            options.eagle3_norm_output,
        )
        vocabulary = sources[-1].vocabulary
        if vocabulary is not None and not find_backend(options.backend).has_vocabulary_maps:
            raise InvalidArgumentError(
                f"the draft's tokenizer differs from the target's; only {names_with(lambda b: b.has_vocabulary_maps)} "
                f"engines translate between two tokenizers, not those of {options.backend}; use --backend cpu or a "
                "draft with the target's tokenizer"
            )
        for source in sources:
            sentence = source.rounding(options.dtype)
            if source.role in fp8_roles(options) and source.head is None:
                types = source.checkpoint.stored_types
                sentence = describe_fp8(source.role, types, source.config, source.weights)
            own = [] if source.head is not None else [f"{source.role}: {line}" for line in source.checkpoint.notes]
            for line in filter(None, (sentence, *own, source.unreachable_ends())):
                if note is not None:
                    note(line)
        build_config = _build_config(options, backend, sources)
        if note is not None and vocabulary is not None:
            note(f"draft: its tokenizer differs; it drafts only {vocabulary}")
        window = sources[-1].draft_window
        if note is not None and window is not None and window < build_config.max_seq_len:
            note(f"draft: it drafts within its {window} tokens only, max_seq_len is {build_config.max_seq_len}")
        _check_output_dir(options)
        if not options.dry_run:
            remove_leftovers(options.output_dir.resolve())
        manifest = _manifest(options, backend, build_config, sources)
        if options.dry_run:
            return None
        if not options.force:
            current = _up_to_date(options.output_dir, manifest, sources)
            if current is not None:
                return current
        try:
            with staged_directory(options.output_dir.resolve()) as staging, kept_interrupts():
                _write(staging, options, backend, manifest, build_config, sources, progress)
        except OSError as error:
            raise _output_error(options.output_dir, error) from error
    return EngineDir.load(options.output_dir)


def _build_config(options: BuildOptions, backend: EngineBuilder, sources: list[Source]) -> BuildConfig:
    longest = sources[0].config.max_position_embeddings
    max_seq_len = options.max_seq_len if options.max_seq_len is not None else min(longest, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= max_seq_len <= longest:
        raise InvalidArgumentError(
            f"max_seq_len is {max_seq_len}; it must be between 2 and {longest}, the target's "
            "max_position_embeddings with its rope scaling"
        )
    max_draft_len, head = options.max_draft_len, sources[-1].head
    if isinstance(head, BlockDrafter):
        max_draft_len = min(MAX_DRAFT_LEN if max_draft_len is None else max_draft_len, head.config.num_places)
    elif max_draft_len is None:
        max_draft_len = DEFAULT_DRAFT_LEN
    if isinstance(head, MedusaHeads):
        max_draft_len = min(max_draft_len, head.config.num_heads)
    return BuildConfig(
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        tokens_per_block=backend.tokens_per_block(options.tokens_per_block, max_seq_len),
    )


def _check_output_dir(options: BuildOptions) -> None:
    output = options.output_dir.resolve()
    kept = [options.checkpoint_dir, options.draft_checkpoint_dir, options.tokenizer_dir, Path.cwd(), Path.home()]
    for path in filter(None, kept):
        if path.resolve().is_relative_to(output):
            raise InvalidArgumentError(
                f"output_dir {options.output_dir} would replace {path}; choose a directory of its own"
            )
    if os.path.ismount(output):
        raise EngineFileError(
            f"output_dir {options.output_dir} is a mount point, which cannot be replaced; name a folder inside it"
        )
    if not options.output_dir.exists() or options.force:
        return
    if not options.output_dir.is_dir():
        raise EngineFileError(f"output_dir {options.output_dir} is a file; choose another or use --force")
    try:
        foreign = any(options.output_dir.iterdir()) and not (options.output_dir / MANIFEST_FILE).exists()
    except OSError as error:
        raise _output_error(options.output_dir, error) from error
    if foreign:
        raise EngineFileError(
            f"output_dir {options.output_dir} holds other things than engines (no {MANIFEST_FILE}); "
            "choose another or use --force to replace it"
        )


def _manifest(
    options: BuildOptions, backend: EngineBuilder, build_config: BuildConfig, sources: list[Source]
) -> dict[str, Any]:
    """Return the manifest without `files` and without hashes of the checkpoints' files."""
    return {
        "format": MANIFEST_FORMAT,
        "faser_version": __version__,
        "backend": options.backend,
        "dtype": options.dtype,
        "build_config": dataclasses.asdict(build_config),
        "segments": list(sources[0].segments),
        "expand": options.expand,
        "checkpoints": {source.role: source.stats() for source in sources},
    } | backend.identity(sources, build_config)


def _up_to_date(output_dir: Path, manifest: dict[str, Any], sources: list[Source]) -> EngineDir | None:
    """Return the engines in output_dir if they are complete and the same as this build, else None."""
    try:
        engines = EngineDir.load(output_dir)
    except EngineFileError:
        return None
    built = dict(engines.manifest)
    del built["files"]
    if built | {"checkpoints": None} != manifest | {"checkpoints": None}:
        return None
    if built["checkpoints"].keys() != manifest["checkpoints"].keys():
        return None
    same = all(source.is_same(built["checkpoints"][source.role]) for source in sources)
    return engines if same else None


def _write(
    staging: Path,
    options: BuildOptions,
    backend: EngineBuilder,
    manifest: dict[str, Any],
    build_config: BuildConfig,
    sources: list[Source],
    progress: Progress | None,
) -> None:
    needed = sum(backend.min_bytes(source, build_config) for source in sources)
    if needed > shutil.disk_usage(staging).free:
        raise OSError(errno.ENOSPC, f"the engines need {needed >> 20} MiB")
    for source in sources:
        directory = staging / source.role
        directory.mkdir()
        backend.write_engine(directory / ENGINE_FILE, source, build_config, progress)
        extra = backend.engine_config(source, build_config)
        config = engine_config(source, build_config, options, extra)
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        for name, entry in manifest["checkpoints"][source.role].items():
            entry["sha256"] = sha256_of(source.checkpoint.files[name])
    for source in sources:
        for name, now in source.stats().items():
            recorded = manifest["checkpoints"][source.role][name]
            if any(recorded[key] != value for key, value in now.items()):
                raise CheckpointError(
                    f"{name} of the {source.role} changed while engines were built from it; build again"
                )
    for name, contents in sources[0].checkpoint.tokenizer_files.items():
        (staging / name).write_bytes(contents)
    tokenizer = sources[0].checkpoint.tokenizer
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": list(tokenizer.eos_token_ids)}
    (staging / "generation_config.json").write_text(json.dumps(ends, indent=2))
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(staging).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }
    (staging / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2))


def _output_error(output_dir: Path, error: OSError) -> EngineFileError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EngineFileError(
            f"output_dir {output_dir} is on a full disk ({error.strerror}); free space or choose another"
        )
    return EngineFileError(f"output_dir {output_dir} cannot be written: {reason_of(error)}")
