"""What `faser build` can be asked for, and what of it can be wrong before a checkpoint is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError

BACKENDS = ("cpu", "cuda", "tensorrt_rtx", "tensorrt")
MAX_DRAFT_LEN = 64
_DTYPES = {"cpu": ("bfloat16",), "cuda": ("bfloat16", "float16")}
_TENSORRT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `faser build` is asked for; None and () mean "decide from the checkpoints and the backend".

    max_seq_len: default: what both models were made for, at most 4096. tokens_per_block: default: 32, or max_seq_len
    where the backend's KV cache is linear. exit_layers: layer boundaries that split the (expanded) target into
    segments. expand: times the target's layers (models/expand.py). compute_capabilities: GPUs to build for, as "8.6";
    default: all that the backend builds for unless it is told.
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
    tokens_per_block: int | None = None
    exit_layers: tuple[int, ...] = ()
    expand: int = 1
    compute_capabilities: tuple[str, ...] = ()
    dry_run: bool = False
    force: bool = False


def check_options(options: BuildOptions) -> None:
    """Raise InvalidArgumentError for the first option that no checkpoint could make right."""
    if options.backend not in BACKENDS:
        raise InvalidArgumentError(f"backend {options.backend} is unknown; use {' or '.join(BACKENDS)}")
    dtypes = _DTYPES.get(options.backend, _TENSORRT_DTYPES)
    if options.dtype not in dtypes:
        raise InvalidArgumentError(
            f"dtype is {options.dtype}, the {options.backend} backend builds {' or '.join(dtypes)}"
        )
    if options.compute_capabilities and options.backend != "tensorrt_rtx":
        raise InvalidArgumentError(
            f"compute_capability is {','.join(options.compute_capabilities)}, only the tensorrt_rtx backend builds for "
            "GPUs that are not there; leave it out"
        )
    for name in ("max_batch_size", "max_num_tokens", "expand"):
        if getattr(options, name) < 1:
            raise InvalidArgumentError(f"{name} is {getattr(options, name)}, it must be at least 1")
    if options.max_num_tokens < options.max_batch_size:
        raise InvalidArgumentError(
            f"max_num_tokens is {options.max_num_tokens}, it must be at least max_batch_size "
            f"({options.max_batch_size}), one row for each request"
        )
    if not 0 <= options.max_draft_len <= MAX_DRAFT_LEN:
        raise InvalidArgumentError(
            f"max_draft_len is {options.max_draft_len}, it must be between 0 and {MAX_DRAFT_LEN}"
        )
