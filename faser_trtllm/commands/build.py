"""`faser build`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faser_trtllm.backends import BACKENDS
from faser_trtllm.commands.options import FOREIGN_FLAGS, is_given, numbers, own_flags
from faser_trtllm.commands.progress import ProgressBar
from faser_trtllm.errors import FaserError, InvalidArgumentError

if TYPE_CHECKING:
    from faser_trtllm.builder.engine_dir import EngineDir

CONTEXT = FOREIGN_FLAGS
EXAMPLES = (
    "Examples: faser build --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir engines/built/demo; the same with --backend tensorrt_rtx --output_dir engines/built/demo_rtx. "
    "The flags of trtllm-build and its configurations are understood, refused by name where they cannot be."
)


def build(
    ctx: typer.Context,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="directory that the engines are written to")],
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--checkpoint_dir", help="target checkpoint: a Hugging Face folder, or a GGUF file")
    ] = None,
    draft_checkpoint_dir: Annotated[
        Path | None,
        typer.Option("--draft_checkpoint_dir", help="draft model with the same tokenizer, EAGLE-3 or Medusa heads"),
    ] = None,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option("--tokenizer_dir", help="folder whose tokenizer both models take instead of their own"),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="; ".join(b.name + (f" ({b.note})" if b.note else "") for b in BACKENDS),
        ),
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", help="bfloat16; also float16 for cuda and TensorRT, float32 for TensorRT")
    ] = "bfloat16",
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="requests in one pass")] = 32,
    max_num_tokens: Annotated[int, typer.Option("--max_num_tokens", help="rows in one pass")] = 2048,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max_seq_len", help="tokens of prompt and output; default: the model's, at most 4096"),
    ] = None,
    max_draft_len: Annotated[int, typer.Option("--max_draft_len", help="draft tokens per request and step")] = 8,
    tokens_per_block: Annotated[
        int | None,
        typer.Option("--tokens_per_block", help="a multiple of 16; default: 32, and max_seq_len for tensorrt_rtx"),
    ] = None,
    exit_layers: Annotated[
        str, typer.Option("--exit_layers", help="layer boundaries where drafts may be pruned, such as 2,4")
    ] = "",
    eagle3_layers: Annotated[
        str,
        typer.Option(
            "--eagle3_layers",
            help="target layers whose entering hidden rows an EAGLE-3 head reads, such as 2,16,29; default: as its "
            "config.json says",
        ),
    ] = "",
    mtp: Annotated[
        bool, typer.Option("--mtp", help="the target's own MTP layer drafts, in the draft model's place")
    ] = False,
    mtp_reads_normed: Annotated[
        bool,
        typer.Option(
            "--mtp_reads_normed",
            help="the MTP layer reads the target's rows behind its final norm, as FastMTP's do; default: before it",
        ),
    ] = False,
    expand: Annotated[
        int,
        typer.Option(
            "--expand", help="give the target N times its layers with the same outputs, to stand for a larger model"
        ),
    ] = 1,
    compute_capability: Annotated[
        str,
        typer.Option(
            "--compute_capability",
            help="GPUs that tensorrt_rtx builds for, such as 8.6,12.0; default: all that it supports",
        ),
    ] = "",
    quantization: Annotated[
        str,
        typer.Option(
            "--quantization",
            help="of the target's layers; on the cpu backend: none, int8 (W8A16), int4 (W4A16), W8A8 or "
            "W4A8, those of 4 bits with a scale for each 32 inputs, or 128 (int4:128); on tensorrt and tensorrt_rtx: "
            "none or FP8",
        ),
    ] = "none",
    draft_quantization: Annotated[
        str, typer.Option("--draft_quantization", help="the same of the draft's layers")
    ] = "none",
    quantize_lm_head: Annotated[
        bool,
        typer.Option(
            "--quantize_lm_head", help="quantize the LM heads too, and embeddings that are one matrix with them"
        ),
    ] = False,
    calib_dataset: Annotated[
        Path | None,
        typer.Option(
            "--calib_dataset",
            help="a text file that FP8 calibrates activations on, where a checkpoint has no scales for them",
        ),
    ] = None,
    tp_size: Annotated[
        int,
        typer.Option("--tp_size", help="GPUs that the target is split over, on the cuda backend; the draft is on one"),
    ] = 1,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "--extra_llm_api_options",
            "--build_config",
            help="a configuration of TensorRT-LLM; flags on the command line win over it",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="check everything, write nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace whatever is in output_dir")] = False,
    no_profile: Annotated[
        bool, typer.Option("--no_profile", help="leave out the quick profile, by which speculation auto decides")
    ] = False,
) -> None:
    """Compile a target and a draft checkpoint into engines.

    Engines that this machine can run are profiled for a few seconds, so that speculation auto knows what drafts cost.
    """
    from faser_trtllm.builder.build import BuildOptions, build_engines
    from faser_trtllm.trtllm.convert.tokenizer import check_tokenizer

    given = _from_trtllm(ctx, config)
    tokenizer = given.pop("tokenizer", None)
    checkpoint = given.pop("checkpoint_dir", None) if checkpoint_dir is None else str(checkpoint_dir)
    if checkpoint is None:
        raise InvalidArgumentError("checkpoint_dir is missing; name the target checkpoint with --checkpoint_dir")
    check_tokenizer({"tokenizer": tokenizer}, Path(checkpoint))
    options = BuildOptions(
        checkpoint_dir=Path(checkpoint),
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        tokenizer_dir=tokenizer_dir,
        backend=backend,
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        tokens_per_block=tokens_per_block,
        exit_layers=numbers("exit_layers", exit_layers),
        eagle3_layers=numbers("eagle3_layers", eagle3_layers),
        mtp=mtp,
        mtp_reads_normed=mtp_reads_normed,
        expand=expand,
        compute_capabilities=tuple(part.strip() for part in compute_capability.split(",") if part.strip()),
        quantization=quantization,
        draft_quantization=draft_quantization,
        quantize_lm_head=quantize_lm_head,
        calib_dataset=calib_dataset,
        tp_size=tp_size,
        dry_run=dry_run,
        force=force,
    )
    options = dataclasses.replace(options, **given)
    with ProgressBar() as progress:
        engines = build_engines(options, progress, lambda sentence: print(sentence, file=sys.stderr))
    print(f"{'checked' if dry_run else 'built'} {output_dir}", file=sys.stderr)
    if engines is not None and not no_profile:
        _profile(engines)


def _profile(engines: EngineDir) -> None:
    """The engines stay built whatever becomes of their profile."""
    from faser_trtllm.profiling.ensure import can_measure, measure_once

    if not can_measure(engines):
        return
    try:
        with ProgressBar() as progress:
            seconds = measure_once(engines.path, progress=progress)
    except KeyboardInterrupt:
        print(f"not profiled; `faser profile --quick --engine_dir {engines.path}` makes up for it", file=sys.stderr)
        raise
    except (FaserError, OSError) as error:
        print(f"not profiled ({error}); speculation auto will be fixed:4", file=sys.stderr)
        return
    if seconds is not None:
        print(f"profiled in {seconds:.0f} s", file=sys.stderr)


def _from_trtllm(ctx: typer.Context, config: Path | None) -> dict[str, Any]:
    """Fields of BuildOptions from a configuration, and from flags that only trtllm-build has; reported on stderr.

    What was typed as our own flag is not among them.
    """
    from faser_trtllm.config import read_mapping
    from faser_trtllm.trtllm.convert.convert import convert
    from faser_trtllm.trtllm.convert.flags import BUILD_FLAGS, judge_flags

    flags = judge_flags(ctx.args, BUILD_FLAGS, own_flags(ctx))
    if flags.positional:
        raise InvalidArgumentError(f"{flags.positional[0]!r} is one argument too many; every setting has a flag")
    given: dict[str, Any] = {}
    conversions = [flags.conversion]
    if config is not None:
        conversions.insert(0, convert(read_mapping(config)))
    for conversion in conversions:
        conversion.check()
        if conversion.verdicts:
            print(conversion.as_text(), file=sys.stderr)
        given |= conversion.build
    if "draft_checkpoint_dir" in given:
        given["draft_checkpoint_dir"] = Path(given["draft_checkpoint_dir"])
    if "eagle3_layers" in given:
        given["eagle3_layers"] = tuple(given["eagle3_layers"])
    return {name: value for name, value in given.items() if not is_given(ctx, name)}
