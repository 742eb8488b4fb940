"""Options of `faser build`, and the checks that need no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from faser_trtllm.backends import BACKENDS, find_backend, names_with
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.heads.block import SLOTS
from faser_trtllm.models.heads.eagle3 import NORM_OUTPUTS
from faser_trtllm.models.quantized_weight import FP8, Scheme

MAX_DRAFT_LEN = 64
DEFAULT_DRAFT_LEN = 8
_BACKENDS = "; ".join(b.name + (f" ({b.note})" if b.note else "") for b in BACKENDS)
_FIELDS = {"target": "quantization", "draft": "draft_quantization"}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of `faser build`, with their help; None and () mean "decide from the checkpoints and the backend".

    max_draft_len: at most what Medusa heads or a block give is kept. eagle3_layers: of the target as it was before
    expand. quantization, draft_quantization: as Scheme.parse reads them, or FP8.
    """

    checkpoint_dir: Annotated[Path, "target checkpoint: a Hugging Face folder, or a GGUF file"]
    draft_checkpoint_dir: Annotated[
        Path | None, "draft model, EAGLE-3 head, block drafter (DFlash, DFlash2, DSpark) or Medusa heads"
    ]
    output_dir: Annotated[Path, "directory that the engines are written to"]
    backend: Annotated[str, _BACKENDS] = "cpu"
    dtype: Annotated[str, "bfloat16; also float16 for cuda and TensorRT, float32 for TensorRT"] = "bfloat16"
    max_batch_size: Annotated[int, "requests in one pass"] = 32
    max_num_tokens: Annotated[int, "rows in one pass"] = 2048
    max_seq_len: Annotated[int | None, "tokens of prompt and output; default: the model's, at most 4096"] = None
    max_draft_len: Annotated[
        int | None, "draft tokens per request and step; default: 8, and as many as a block drafter's block has"
    ] = None
    tokens_per_block: Annotated[int | None, "a multiple of 16; default: 32, and max_seq_len for tensorrt_rtx"] = None
    exit_layers: Annotated[tuple[int, ...], "layer boundaries where drafts may be pruned, such as 2,4"] = ()
    eagle3_layers: Annotated[
        tuple[int, ...],
        "target layers whose entering hidden rows an EAGLE-3 head or a block drafter reads, such as 2,16,29; default: "
        "as its config.json says",
    ] = ()
    block_slots: Annotated[
        str,
        "slot of a block that drafts first: anchor (that of the last token) or mask (the next); default: as the block "
        "drafter's config.json says",
    ] = ""
    eagle3_norm_output: Annotated[
        str,
        "what norm_output of an EAGLE-3 head's config.json means, where its layout does not tell: fed (the next draft "
        "reads the final norm's output too) or head (the LM head alone does)",
    ] = ""
    mtp: Annotated[bool, "the target's own MTP layer drafts, in the draft model's place"] = False
    mtp_reads_normed: Annotated[
        bool, "the MTP layer reads the target's rows after its final norm, as FastMTP's do; default: before it"
    ] = False
    expand: Annotated[int, "give the target N times its layers with the same outputs, to stand for a larger model"] = 1
    compute_capabilities: Annotated[
        tuple[str, ...], "GPUs that tensorrt_rtx builds for, such as 8.6,12.0; default: all that it supports"
    ] = ()
    tokenizer_dir: Annotated[Path | None, "folder whose tokenizer both models take instead of their own"] = None
    min_vocab_overlap: Annotated[
        float, "share of the target's tokens that a draft model with another tokenizer must have, on cpu and cuda"
    ] = 0.9
    quantization: Annotated[
        str,
        "of the target's layers; on the cpu backend: none, int8 (W8A16), int4 (W4A16), W8A8 or W4A8, those of 4 bits "
        "with a scale for each 32 inputs, or 128 (int4:128), or mxfp4 (experts only); on tensorrt and tensorrt_rtx: "
        "none or FP8",
    ] = "none"
    draft_quantization: Annotated[str, "the same of the draft's layers"] = "none"
    quantize_lm_head: Annotated[bool, "quantize the LM heads too, and embeddings that are one matrix with them"] = False
    calib_dataset: Annotated[
        Path | None,
        "a text file that FP8 calibrates activations on, where a checkpoint has no scales for them; default: a file of "
        "Python's standard library",
    ] = None
    tp_size: Annotated[int, "GPUs that the target is split over, on the cuda backend; the draft is on one"] = 1
    dry_run: Annotated[bool, "check everything, write nothing"] = False
    force: Annotated[bool, "replace whatever is in output_dir"] = False


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
    if options.eagle3_norm_output and options.eagle3_norm_output not in NORM_OUTPUTS:
        raise InvalidArgumentError(
            f"eagle3_norm_output is {options.eagle3_norm_output}, it must be {' or '.join(NORM_OUTPUTS)}"
        )
    if options.mtp and options.draft_checkpoint_dir is not None:
        raise InvalidArgumentError(
            f"mtp is set with draft_checkpoint_dir {options.draft_checkpoint_dir}, and one of them drafts; leave one "
            "out"
        )
    if options.block_slots and options.block_slots not in SLOTS:
        raise InvalidArgumentError(f"block_slots is {options.block_slots}, it must be {' or '.join(SLOTS)}")
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
    if options.quantize_lm_head and any(scheme.is_mxfp4 for scheme in schemes.values()):
        raise InvalidArgumentError(
            "quantize_lm_head is set with quantization mxfp4, which is of experts only; leave it out"
        )
    if options.quantize_lm_head and not schemes:
        raise InvalidArgumentError("quantize_lm_head is set without a quantization; add --quantization int8 or int4")
    if not 0 < options.min_vocab_overlap <= 1:
        raise InvalidArgumentError(
            f"min_vocab_overlap is {options.min_vocab_overlap:g}, it must be above 0 and at most 1"
        )
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
    if options.max_draft_len is not None and not 0 <= options.max_draft_len <= MAX_DRAFT_LEN:
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
