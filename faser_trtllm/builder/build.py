"""`faser build`: checkpoints in, an engine directory out; whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faser_trtllm import __version__
from faser_trtllm.builder import engine_file
from faser_trtllm.builder.cpu_engine import engine_model, engine_tensors
from faser_trtllm.builder.engine_dir import (
    CONFIG_FILE,
    ENGINE_FILE,
    MANIFEST_FILE,
    MANIFEST_FORMAT,
    BuildConfig,
    EngineDir,
    sha256_of,
)
from faser_trtllm.builder.staging import staged_directory
from faser_trtllm.errors import CheckpointError, EngineFileError, InvalidArgumentError
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.expand import ExpandedWeights, expand_config
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.vocabulary import ResizedVocabulary, resize_vocabulary
from faser_trtllm.models.weights import INDEX_FILE, CheckpointWeights, Weights, check_weights

DEFAULT_MAX_SEQ_LEN = 4096
MAX_DRAFT_LEN = 64
BACKENDS = ("cpu",)
PLANNED_BACKENDS = ("tensorrt", "tensorrt_rtx", "cuda")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HASHED_FILES = ("config.json", "generation_config.json", *_TOKENIZER_FILES, INDEX_FILE)

Progress = Callable[[str, int, int], None]  # what is being built ("target", "draft"), tensors done, tensors in all


@dataclasses.dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `faser build` is asked for; None and () mean "decide from the checkpoints".

    max_seq_len: default: what both models were made for, at most 4096. exit_layers: layer boundaries that
    split the (expanded) target into segments. expand: times the target's layers (models/expand.py).
    """

    checkpoint_dir: Path
    draft_checkpoint_dir: Path | None
    output_dir: Path
    backend: str = "cpu"
    dtype: str = "bfloat16"
    max_batch_size: int = 32
    max_num_tokens: int = 2048
    max_seq_len: int | None = None
    max_draft_len: int = 8
    tokens_per_block: int = 32
    exit_layers: tuple[int, ...] = ()
    expand: int = 1
    dry_run: bool = False
    force: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """One opened checkpoint, as it is to be built."""

    role: str
    directory: Path
    config: ModelConfig
    weights: Weights
    segments: list[int]
    files: tuple[str, ...]


def build_engines(options: BuildOptions, progress: Progress | None = None) -> EngineDir | None:
    """Build, or find that output_dir holds just this build; None after a dry run, which writes nothing.

    Raises InvalidArgumentError for options, CheckpointError for checkpoints and EngineFileError where
    output_dir cannot be written or must not be replaced. On any failure output_dir is what it was.
    """
    _check_options(options)
    with ExitStack() as stack:
        target = _open_target(options, stack)
        sources = [target]
        if options.draft_checkpoint_dir is not None:
            sources.append(_open_draft(options.draft_checkpoint_dir, target.config.vocab_size, stack))
        _check_tokenizers(sources)
        build_config = _build_config(options, sources)
        _check_output_dir(options)
        manifest = _manifest(options, build_config, sources)
        if options.dry_run:
            return None
        if not options.force:
            current = _up_to_date(options.output_dir, manifest, sources)
            if current is not None:
                return current
        try:
            with staged_directory(options.output_dir.resolve()) as staging:
                _write(staging, manifest, build_config, sources, progress)
        except OSError as error:
            raise _output_error(options.output_dir, error) from error
    return EngineDir.load(options.output_dir)


def _check_options(options: BuildOptions) -> None:
    if options.backend not in BACKENDS:
        reason = "is not built yet in this version" if options.backend in PLANNED_BACKENDS else "is unknown"
        raise InvalidArgumentError(f"backend {options.backend} {reason}; use {' or '.join(BACKENDS)}")
    if options.dtype != "bfloat16":
        raise InvalidArgumentError(f"dtype is {options.dtype}, the cpu backend builds bfloat16 only")
    for name in ("max_batch_size", "max_num_tokens", "expand"):
        if getattr(options, name) < 1:
            raise InvalidArgumentError(f"{name} is {getattr(options, name)}, it must be at least 1")
    if options.max_num_tokens < options.max_batch_size:
        raise InvalidArgumentError(
            f"max_num_tokens is {options.max_num_tokens}, it must be at least max_batch_size "
            f"({options.max_batch_size}), one row for each request"
        )
    if options.tokens_per_block < 16 or options.tokens_per_block % 16:
        raise InvalidArgumentError(f"tokens_per_block is {options.tokens_per_block}, it must be a multiple of 16")
    if not 0 <= options.max_draft_len <= MAX_DRAFT_LEN:
        raise InvalidArgumentError(
            f"max_draft_len is {options.max_draft_len}, it must be between 0 and {MAX_DRAFT_LEN}"
        )


def _open_target(options: BuildOptions, stack: ExitStack) -> _Source:
    directory = options.checkpoint_dir
    config, checkpoint = _open_checkpoint("target", directory, stack)
    config = expand_config(config, options.expand)
    weights = ExpandedWeights(checkpoint, options.expand)
    segments = _segments(options.exit_layers, config.num_layers)
    return _Source("target", directory, config, weights, segments, checkpoint.files)


def _open_draft(directory: Path, vocab_size: int, stack: ExitStack) -> _Source:
    config, checkpoint = _open_checkpoint("draft", directory, stack)
    weights: Weights = checkpoint
    if config.vocab_size != vocab_size:
        config, weights = resize_vocabulary(config, vocab_size), ResizedVocabulary(checkpoint, vocab_size)
    return _Source("draft", directory, config, weights, [0, config.num_layers], checkpoint.files)


def _open_checkpoint(role: str, directory: Path, stack: ExitStack) -> tuple[ModelConfig, CheckpointWeights]:
    if not os.path.isdir(directory):
        raise CheckpointError(f"the {role} checkpoint {directory} is not a directory that can be read")
    config = load_model_config(directory)
    checkpoint = stack.enter_context(CheckpointWeights(directory))
    check_weights(checkpoint, config)
    return config, checkpoint


def _segments(exit_layers: tuple[int, ...], num_layers: int) -> list[int]:
    for layer in exit_layers:
        if not 0 < layer < num_layers:
            raise InvalidArgumentError(
                f"exit_layers has {layer}, boundaries lie between 1 and {num_layers - 1} in a model of "
                f"{num_layers} layers"
            )
    if len(set(exit_layers)) != len(exit_layers):
        raise InvalidArgumentError(f"exit_layers {list(exit_layers)} names a layer twice")
    return [0, *sorted(exit_layers), num_layers]


def _check_tokenizers(sources: list[_Source]) -> None:
    tokenizers = [Tokenizer.load(source.directory) for source in sources]
    if len(sources) == 1:
        return
    difference = tokenizers[0].first_difference(tokenizers[1], names=("the target", "the draft"))
    if difference is not None:
        raise CheckpointError(f"target and draft must share one tokenizer, but {difference}")


def _build_config(options: BuildOptions, sources: list[_Source]) -> BuildConfig:
    longest = min(source.config.max_position_embeddings for source in sources)
    max_seq_len = options.max_seq_len if options.max_seq_len is not None else min(longest, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= max_seq_len <= longest:
        raise InvalidArgumentError(
            f"max_seq_len is {max_seq_len}, it must be between 2 and {longest}, the checkpoints' "
            "max_position_embeddings"
        )
    return BuildConfig(
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=options.max_draft_len if len(sources) > 1 else 0,
        tokens_per_block=options.tokens_per_block,
    )


def _check_output_dir(options: BuildOptions) -> None:
    output = options.output_dir.resolve()
    kept = [options.checkpoint_dir, options.draft_checkpoint_dir, Path.cwd(), Path.home()]
    for path in filter(None, kept):
        if path.resolve().is_relative_to(output):
            raise InvalidArgumentError(
                f"output_dir {options.output_dir} would replace {path}; choose a directory of its own"
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


def _manifest(options: BuildOptions, build_config: BuildConfig, sources: list[_Source]) -> dict[str, Any]:
    """The manifest without its `files`, and with the checkpoints' files not hashed yet."""
    return {
        "format": MANIFEST_FORMAT,
        "faser_version": __version__,
        "engine_file_version": engine_file.VERSION,
        "backend": options.backend,
        "dtype": options.dtype,
        "build_config": dataclasses.asdict(build_config),
        "segments": sources[0].segments,
        "expand": options.expand,
        "checkpoints": {source.role: _checkpoint_stats(source) for source in sources},
    }


def _checkpoint_stats(source: _Source) -> dict[str, Any]:
    names = [*source.files, *(name for name in _HASHED_FILES if (source.directory / name).exists())]
    stats = {name: (source.directory / name).stat() for name in names}
    return {
        name: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
        for name, stat in stats.items()
    }


def _up_to_date(output_dir: Path, manifest: dict[str, Any], sources: list[_Source]) -> EngineDir | None:
    """The engines in output_dir if they are whole and just what would be built."""
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
    for source in sources:
        before, now = built["checkpoints"][source.role], manifest["checkpoints"][source.role]
        if before.keys() != now.keys():
            return None
        for name, stat in now.items():
            # The same file untouched need not be read again, which takes minutes for large checkpoints.
            if stat != {key: before[name].get(key) for key in stat} and before[name].get("sha256") != sha256_of(
                source.directory / name
            ):
                return None
    return engines


def _write(
    staging: Path,
    manifest: dict[str, Any],
    build_config: BuildConfig,
    sources: list[_Source],
    progress: Progress | None,
) -> None:
    _check_disk_space(staging, build_config, sources)
    for source in sources:
        directory = staging / source.role
        directory.mkdir()
        _write_engine(directory / ENGINE_FILE, source, build_config, progress)
        config = _engine_config(source, build_config, manifest)
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        for name, entry in manifest["checkpoints"][source.role].items():
            entry["sha256"] = sha256_of(source.directory / name)
    target = sources[0]
    for name in _TOKENIZER_FILES:
        if (target.directory / name).exists():
            shutil.copyfile(target.directory / name, staging / name)
    tokenizer = Tokenizer.load(target.directory)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": list(tokenizer.eos_token_ids)}
    (staging / "generation_config.json").write_text(json.dumps(ends, indent=2))
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(staging).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }
    (staging / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2))


def _write_engine(path: Path, source: _Source, build_config: BuildConfig, progress: Progress | None) -> None:
    tensors = list(engine_tensors(source.config, source.weights))
    done = 0

    def on_tensor(name: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(source.role, done, len(tensors))

    model = engine_model(source.config, build_config.max_seq_len)
    engine_file.write_engine_file(path, model, source.segments, tensors, on_tensor)


def _check_disk_space(staging: Path, build_config: BuildConfig, sources: list[_Source]) -> None:
    needed = sum(
        nbytes
        for source in sources
        for nbytes, required in engine_file.tensor_sizes(engine_model(source.config, build_config.max_seq_len)).values()
        if required
    )
    if needed > shutil.disk_usage(staging).free:
        raise OSError(errno.ENOSPC, f"the engines need {needed >> 20} MiB")


def _engine_config(source: _Source, build_config: BuildConfig, manifest: dict[str, Any]) -> dict[str, Any]:
    """TensorRT-LLM's config.json of an engine (tensorrt_llm/builder.py), with what is ours under "faser"."""
    config = source.config
    return {
        "version": __version__,
        "pretrained_config": {
            "architecture": config.architecture,
            "dtype": manifest["dtype"],
            "logits_dtype": "float32",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_size": config.head_dim,
            "hidden_act": "silu",
            "norm_epsilon": config.rms_norm_eps,
            "position_embedding_type": "rope_gpt_neox",
            "max_position_embeddings": config.max_position_embeddings,
            "rotary_base": config.rope.theta,
            "rotary_scaling": dataclasses.asdict(config.rope),
            "qk_layernorm": config.qk_norm,
            "attn_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "share_embedding_table": config.tie_word_embeddings,
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        },
        "build_config": {
            "max_batch_size": build_config.max_batch_size,
            "max_num_tokens": build_config.max_num_tokens,
            "max_seq_len": build_config.max_seq_len,
            "max_input_len": build_config.max_seq_len - 1,
            "max_beam_width": 1,
            "max_draft_len": build_config.max_draft_len,
            "kv_cache_type": "PAGED",
            "plugin_config": {"tokens_per_block": build_config.tokens_per_block},
        },
        "faser": {
            "role": source.role,
            "backend": manifest["backend"],
            "segments": source.segments,
            "expand": manifest["expand"] if source.role == "target" else 1,
            "sliding_window": config.sliding_window,
        },
    }


def _output_error(output_dir: Path, error: OSError) -> EngineFileError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EngineFileError(
            f"output_dir {output_dir} is on a full disk ({error.strerror}); free space or choose another"
        )
    return EngineFileError(f"output_dir {output_dir} cannot be written: {error.strerror}")
