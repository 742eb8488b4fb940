"""Options of `faser build`, and the checks that need no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from faser_trtllm.backends import find_backend, names_with
from faser_trtllm.builder.network.fp8 import FP8
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.quantized_weight import Scheme

MAX_DRAFT_LEN = 64
_FIELDS = {"target": "quantization", "draft": "draft_quantization"}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of `faser build`; None and () mean "decide from the checkpoints and the backend".

    checkpoint_dir and draft_checkpoint_dir: Hugging Face folders or GGUF files; the draft may be an EAGLE-3 head or
    Medusa heads. tokenizer_dir: a folder whose tokenizer both models take instead of their own. max_seq_len: default:
    the limit of both models, at most 4096. max_draft_len: at most the number of Medusa heads is kept. tokens_per_block:
    default: 32, or max_seq_len if the backend's KV cache is linear. exit_layers: layer boundaries that split the
    (expanded) target into segments. eagle3_layers: of the target as it was before expand, whose entering hidden rows an
    EAGLE-3 head reads; default: as the head's config.json says. mtp: the target's own MTP layer drafts;
    mtp_reads_normed: from the target's hidden rows behind its final norm, not before it. expand: times the target's
    layers (models/expand.py).
    compute_capabilities: GPUs to build for, as "8.6"; default: the backend's default GPUs.
    quantization, draft_quantization: as Scheme.parse reads them, or FP8, of the target's and of the draft's layers;
    quantize_lm_head: of their LM heads too. calib_dataset: a text file that activations in fp8 are calibrated on;
    default: a file of Python's standard library. tp_size: ranks that the target is split over, a GPU each.
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
    eagle3_layers: tuple[int, ...] = ()
    mtp: bool = False
    mtp_reads_normed: bool = False
    expand: int = 1
    compute_capabilities: tuple[str, ...] = ()
    tokenizer_dir: Path | None = None
    quantization: str = "none"
    draft_quantization: str = "none"
    quantize_lm_head: bool = False
    calib_dataset: Path | None = None
    tp_size: int = 1
    dry_run: bool = False
    force: bool = False


def fp8_roles(options: BuildOptions) -> frozenset[str]:
    """The roles whose layers are to be in fp8."""
    texts = {"target": options.quantization, "draft": options.draft_quantization}
    return frozenset(role for role, text in texts.items() if text.upper() == FP8)


def schemes_of(options: BuildOptions) -> dict[str, Scheme]:
    """How the weights of a role become integers; InvalidArgumentError for a spelling that is none."""
    schemes, in_fp8 = {}, fp8_roles(options)
    for role, text in (("target", options.quantization), ("draft", options.draft_quantization)):
        scheme = None if role in in_fp8 else Scheme.parse(text, _FIELDS[role])
        if scheme is not None:
            schemes[role] = replace(scheme, lm_head=options.quantize_lm_head)
    return schemes


def check_options(options: BuildOptions) -> None:
    """Raise InvalidArgumentError for the first option that is wrong for any checkpoint."""
    backend = find_backend(options.backend)
    if options.dtype not in backend.dtypes:
        raise InvalidArgumentError(
            f"dtype is {options.dtype}, the {options.backend} backend builds {' or '.join(backend.dtypes)}"
        )
    if options.compute_capabilities and not backend.builds_for_other_gpus:
        raise InvalidArgumentError(
            f"compute_capability is {','.join(options.compute_capabilities)}, only the "
            f"{names_with(lambda b: b.builds_for_other_gpus)} backend builds for GPUs that are not there; leave it out"
        )
    schemes, in_fp8 = schemes_of(options), fp8_roles(options)
    _check_fp8(options, in_fp8)
    if schemes and not backend.has_integer_weights:
        role, scheme = next(iter(schemes.items()))
        raise InvalidArgumentError(
            f"{_FIELDS[role]} is {scheme}, only {names_with(lambda b: b.has_integer_weights)} engines hold integer "
            f"weights, not those of {options.backend}; leave it out or use --backend cpu"
        )
    if options.mtp and options.draft_checkpoint_dir is not None:
        raise InvalidArgumentError(
            f"mtp is set beside draft_checkpoint_dir {options.draft_checkpoint_dir}, and one of them drafts; leave one "
            "out"
        )
    if options.mtp_reads_normed and not options.mtp:
        raise InvalidArgumentError("mtp_reads_normed is set without mtp; add --mtp or leave it out")
    if "draft" in {*schemes, *in_fp8} and options.draft_checkpoint_dir is None and not options.mtp:
        raise InvalidArgumentError(
            f"draft_quantization is {options.draft_quantization} without a draft; add --draft_checkpoint_dir or leave "
            "it out"
        )
    if options.quantize_lm_head and in_fp8:
        raise InvalidArgumentError(
            f"quantize_lm_head is set with quantization {FP8}, where LM heads stay in {options.dtype}; leave it out"
        )
    if options.quantize_lm_head and not schemes:
        raise InvalidArgumentError("quantize_lm_head is set without a quantization; add --quantization int8 or int4")
    for name in ("max_batch_size", "max_num_tokens", "expand", "tp_size"):
        if getattr(options, name) < 1:
            raise InvalidArgumentError(f"{name} is {getattr(options, name)}, it must be at least 1")
    if options.tp_size > 1 and not backend.has_ranks:
        raise InvalidArgumentError(
            f"tp_size is {options.tp_size}, and only {names_with(lambda b: b.has_ranks)} engines are split over GPUs, "
            f"not those of {options.backend}; leave it out or use --backend cuda"
        )
    if options.max_num_tokens < options.max_batch_size:
        raise InvalidArgumentError(
            f"max_num_tokens is {options.max_num_tokens}, it must be at least max_batch_size "
            f"({options.max_batch_size}), one row for each request"
        )
    if not 0 <= options.max_draft_len <= MAX_DRAFT_LEN:
        raise InvalidArgumentError(
            f"max_draft_len is {options.max_draft_len}, it must be between 0 and {MAX_DRAFT_LEN}"
        )


def _check_fp8(options: BuildOptions, roles: frozenset[str]) -> None:
    backend = find_backend(options.backend)
    if roles and not backend.builds_fp8:
        fix = "use int8 or W8A8"
        if backend.has_fp8:
            fix = (
                "leave it out and set quantization to fp8 in faser.yaml, since they are quantised when they are opened"
            )
        raise InvalidArgumentError(
            f"quantization is {FP8}, only {names_with(lambda b: b.builds_fp8)} engines are built in it, not "
            f"those of {options.backend}; {fix}"
        )
    if options.calib_dataset is not None and not roles:
        raise InvalidArgumentError(
            f"calib_dataset is {options.calib_dataset} without a quantization that calibrates; add --quantization "
            f"{FP8} or leave it out"
        )
