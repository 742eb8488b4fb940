"""Define the options of `faser build`, and check them as far as that needs no checkpoint."""

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

    eagle3_layers: numbers of the target's layers before expand.
    quantization, draft_quantization: a spelling of Scheme.parse, or FP8.
    """

    checkpoint_dir: Annotated[Path, "target checkpoint: a Hugging Face folder, or a GGUF file"]
    draft_checkpoint_dir: Annotated[
        Path | None, "draft model, EAGLE-3 head, block drafter (DFlash, DFlash2, DSpark) or Medusa heads"
    ]
    output_dir: Annotated[Path, "directory that the engines are written to"]
    backend: Annotated[str, _BACKENDS] = "cpu"
    dtype: Annotated[str, "bfloat16; also float16 for cuda and TensorRT, float32 for TensorRT"] = "bfloat16"
    max_batch_size: Annotated[int, "most requests in one pass"] = 32
    max_num_tokens: Annotated[int, "most rows (tokens) in one pass"] = 2048
    max_seq_len: Annotated[int | None, "most tokens of prompt and output; default: the model's, at most 4096"] = None
    max_draft_len: Annotated[
        int | None, "most draft tokens per request and step; default: 8, or as many as a block drafter's block has"
    ] = None
    tokens_per_block: Annotated[int | None, "a multiple of 16; default: 32, or max_seq_len for tensorrt_rtx"] = None
    exit_layers: Annotated[tuple[int, ...], "layer boundaries where drafts may be pruned, such as 2,4"] = ()
    eagle3_layers: Annotated[
        tuple[int, ...],
        "target layers whose input an EAGLE-3 head or a block drafter reads, such as 2,16,29; default: from its "
        "config.json",
    ] = ()
    block_slots: Annotated[
        str,
        "first slot of a block that drafts: anchor (the last token's) or mask (the one after it); default: from the "
        "block drafter's config.json",
    ] = ""
    eagle3_norm_output: Annotated[
        str,
        "meaning of norm_output in an EAGLE-3 head's config.json, if its layout leaves it open: fed (the next draft "
        "and the LM head read the final norm's output) or head (only the LM head does)",
    ] = ""
    mtp: Annotated[bool, "draft with the target's own MTP layer instead of a draft model"] = False
    mtp_reads_normed: Annotated[
        bool, "the MTP layer reads the target's hidden rows after the final norm, as in FastMTP; default: before it"
    ] = False
    expand: Annotated[int, "imitate the cost of a larger target: N times the layers, the same outputs"] = 1
    compute_capabilities: Annotated[
        tuple[str, ...], "GPUs that tensorrt_rtx builds for, such as 8.6,12.0; default: all supported ones"
    ] = ()
    tokenizer_dir: Annotated[Path | None, "folder with a tokenizer for both models; default: their own"] = None
    min_vocab_overlap: Annotated[
        float, "on cpu and cuda: share of the target's tokens that a draft model with another tokenizer must have"
    ] = 0.9
    quantization: Annotated[
        str,
        "quantization of the target's layers; cpu: none, int8 (W8A16), int4 (W4A16; int4:128 for groups of 128 inputs "
        "instead of 32), W8A8, W4A8 or mxfp4 (experts only); cuda: none or mxfp4; tensorrt and tensorrt_rtx: none or "
        "FP8",
    ] = "none"
    draft_quantization: Annotated[str, "quantization of the draft's layers; values as above"] = "none"
    quantize_lm_head: Annotated[bool, "quantize the LM heads, too, and embeddings tied to them"] = False
    calib_dataset: Annotated[
        Path | None,
        "text file to calibrate FP8 activations on, if a checkpoint has no scales; default: a file of Python's "
        "standard library",
    ] = None
    tp_size: Annotated[int, "on cuda: GPUs that the target is split over; the draft uses one"] = 1
    dry_run: Annotated[bool, "check everything but write nothing"] = False
    force: Annotated[bool, "replace the contents of output_dir"] = False


def fp8_roles(options: BuildOptions) -> frozenset[str]:
    """Return the roles ("target", "draft") whose layers will be in fp8."""
    texts = {"target": options.quantization, "draft": options.draft_quantization}
    return frozenset(role for role, text in texts.items() if text.upper() == FP8)


def schemes_of(options: BuildOptions) -> dict[str, Scheme]:
    """Return {role: integer quantization} of the roles that have one; InvalidArgumentError for an unknown spelling."""
    schemes, in_fp8 = {}, fp8_roles(options)
    for role, text in (("target", options.quantization), ("draft", options.draft_quantization)):
        scheme = None if role in in_fp8 else Scheme.parse(text, _FIELDS[role])
        if scheme is not None:
            schemes[role] = replace(scheme, lm_head=options.quantize_lm_head)
    return schemes


def check_options(options: BuildOptions) -> None:
    """Raise InvalidArgumentError for the first option that is wrong whatever the checkpoints are."""
    backend = find_backend(options.backend)
    if options.dtype not in backend.dtypes:
        raise InvalidArgumentError(
            f"dtype is {options.dtype}, the {options.backend} backend builds {' or '.join(backend.dtypes)}"
        )
    if options.compute_capabilities and not backend.builds_for_other_gpus:
        raise InvalidArgumentError(
            f"compute_capability is {','.join(options.compute_capabilities)}, but only the "
            f"{names_with(lambda b: b.builds_for_other_gpus)} backend can build for a GPU that this machine does not "
            "have; leave it out"
        )
    schemes, in_fp8 = schemes_of(options), fp8_roles(options)
    _check_fp8(options, in_fp8)
    for role, scheme in schemes.items():
        if backend.has_mxfp4 if scheme.is_mxfp4 else backend.has_integer_weights:
            continue
        raise InvalidArgumentError(
            f"{_FIELDS[role]} is {scheme}, which {options.backend} engines do not hold; leave it out or use --backend "
            "cpu"
        )
    if options.eagle3_norm_output and options.eagle3_norm_output not in NORM_OUTPUTS:
        raise InvalidArgumentError(
            f"eagle3_norm_output is {options.eagle3_norm_output}; it must be {' or '.join(NORM_OUTPUTS)}"
        )
    if options.mtp and options.draft_checkpoint_dir is not None:
        raise InvalidArgumentError(
            f"mtp is set with draft_checkpoint_dir {options.draft_checkpoint_dir}, and one of them drafts; leave one "
            "out"
        )
    if options.block_slots and options.block_slots not in SLOTS:
        raise InvalidArgumentError(f"block_slots is {options.block_slots}; it must be {' or '.join(SLOTS)}")
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
            "quantize_lm_head is set with quantization mxfp4, which quantizes only experts; leave it out"
        )
    if options.quantize_lm_head and not schemes:
        raise InvalidArgumentError("quantize_lm_head is set without a quantization; add --quantization int8 or int4")
    if not 0 < options.min_vocab_overlap <= 1:
        raise InvalidArgumentError(
            f"min_vocab_overlap is {options.min_vocab_overlap:g}; it must be above 0 and at most 1"
        )
    for name in ("max_batch_size", "max_num_tokens", "expand", "tp_size"):
        if getattr(options, name) < 1:
            raise InvalidArgumentError(f"{name} is {getattr(options, name)}; it must be at least 1")
    if options.tp_size > 1 and not backend.has_ranks:
        raise InvalidArgumentError(
            f"tp_size is {options.tp_size}, and only {names_with(lambda b: b.has_ranks)} engines are split over GPUs, "
            f"not those of {options.backend}; leave it out or use --backend cuda"
        )
    if options.max_num_tokens < options.max_batch_size:
        raise InvalidArgumentError(
            f"max_num_tokens is {options.max_num_tokens}; it must be at least max_batch_size "
            f"({options.max_batch_size}), one row for each request"
        )
    if options.max_draft_len is not None and not 0 <= options.max_draft_len <= MAX_DRAFT_LEN:
        raise InvalidArgumentError(
            f"max_draft_len is {options.max_draft_len}; it must be between 0 and {MAX_DRAFT_LEN}"
        )


def _check_fp8(options: BuildOptions, roles: frozenset[str]) -> None:
    backend = find_backend(options.backend)
    if roles and not backend.builds_fp8:
        fix = "use int8 or W8A8"
        if backend.has_fp8:
            fix = (
                "leave it out and set quantization to fp8 in faser.yaml, since they are quantized when they are opened"
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
