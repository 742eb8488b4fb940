"""`faser build`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import numbers
from faser_trtllm.commands.progress import ProgressBar

EXAMPLES = (
    "Examples: faser build --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir engines/built/demo; the same with --backend tensorrt_rtx --output_dir engines/built/demo_rtx"
)


def build(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="target checkpoint, Hugging Face format")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where the engines go")],
    draft_checkpoint_dir: Annotated[
        Path | None, typer.Option("--draft_checkpoint_dir", help="draft checkpoint with the same tokenizer")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="cpu; tensorrt_rtx: built on any machine, for RTX GPUs; tensorrt: built on the GPU it is for",
        ),
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", help="bfloat16; TensorRT also: float16, float32 (to compare with)")
    ] = "bfloat16",
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="requests in one pass")] = 32,
    max_num_tokens: Annotated[int, typer.Option("--max_num_tokens", help="rows in one pass")] = 2048,
    max_seq_len: Annotated[
        int | None, typer.Option("--max_seq_len", help="prompt and output; default: the model's, at most 4096")
    ] = None,
    max_draft_len: Annotated[int, typer.Option("--max_draft_len", help="pending drafts per request")] = 8,
    tokens_per_block: Annotated[
        int | None,
        typer.Option("--tokens_per_block", help="a multiple of 16; default: 32, and max_seq_len for tensorrt_rtx"),
    ] = None,
    exit_layers: Annotated[
        str, typer.Option("--exit_layers", help="layer boundaries where rows may be pruned, as 2,4")
    ] = "",
    expand: Annotated[
        int, typer.Option("--expand", help="N times the target's layers with the same function: a cost knob")
    ] = 1,
    compute_capability: Annotated[
        str,
        typer.Option(
            "--compute_capability", help="GPUs that tensorrt_rtx builds for, as 8.6,12.0; default: its own set"
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry_run", help="check everything, write nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace whatever is in output_dir")] = False,
) -> None:
    """Compile a target and a draft checkpoint into engines."""
    from faser_trtllm.builder.build import BuildOptions, build_engines

    options = BuildOptions(
        checkpoint_dir=checkpoint_dir,
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        backend=backend,
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        tokens_per_block=tokens_per_block,
        exit_layers=numbers("exit_layers", exit_layers),
        expand=expand,
        compute_capabilities=tuple(part.strip() for part in compute_capability.split(",") if part.strip()),
        dry_run=dry_run,
        force=force,
    )
    with ProgressBar() as progress:
        build_engines(options, progress)
    print(f"{'checked' if dry_run else 'built'} {output_dir}", file=sys.stderr)
