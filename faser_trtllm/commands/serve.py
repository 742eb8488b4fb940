"""`faser serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import own_flags
from faser_trtllm.config import SPELLINGS
from faser_trtllm.errors import InvalidArgumentError

EXAMPLES = (
    "Examples: faser serve --engine_dir engines/built/demo --http_port 8000 --grpc_port 8001; "
    "faser serve engines/built/demo --config trtllm.yaml --max_batch_size 16. The flags of trtllm-serve and its "
    "YAML are understood, refused by name where they cannot be."
)


def serve(
    ctx: typer.Context,
    engine_dir: Annotated[
        Path | None, typer.Option("--engine_dir", help="may also stand alone; default: engine_dir of --config")
    ] = None,
    http_port: Annotated[int, typer.Option("--http_port", "--port")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics_port")] = 8002,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    config: Annotated[
        Path | None,
        typer.Option("--config", "--extra_llm_api_options", help="faser.yaml, or a configuration of TensorRT-LLM"),
    ] = None,
    model_repo: Annotated[Path | None, typer.Option("--model_repo", help="default: the one that ships")] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
    models: Annotated[
        str | None, typer.Option("--models", help="to load, one engine serves them all; default: all of the repository")
    ] = None,
    allow_hash_mismatch: Annotated[
        bool,
        typer.Option("--allow_hash_mismatch", help="serve engine files that are not those of their manifest.json"),
    ] = False,
    allow_control: Annotated[
        bool,
        typer.Option(
            "--allow_control",
            help="let whoever reaches the ports load models, register shared memory and set logs and traces; "
            "else that takes the key in FASER_CONTROL_KEY or in the file FASER_CONTROL_KEY_FILE",
        ),
    ] = False,
) -> None:
    """Serve engines behind NVIDIA Triton: wait until ready, drain on SIGTERM."""
    from faser_trtllm.serving.launcher import serve as run
    from faser_trtllm.serving.serve_options import ServeOptions
    from faser_trtllm.trtllm.flags import SERVE_FLAGS, judge_flags
    from faser_trtllm.trtllm.tokenizer import check_tokenizer

    flags = judge_flags(ctx.args, SERVE_FLAGS, own_flags(ctx))
    if len(flags.positional) > (engine_dir is None):
        raise InvalidArgumentError(f"{flags.positional[-1]!r} is one argument too many; name one engine directory")
    if flags.positional:
        engine_dir = Path(flags.positional[0])
    if engine_dir is not None:
        check_tokenizer(flags.conversion.build, engine_dir)
    if flags.conversion.verdicts:
        print(flags.conversion.as_text(), file=sys.stderr)
    code = run(
        ServeOptions(
            engine_dir=engine_dir,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            host=host,
            config=config,
            model_repo=model_repo,
            speculation=speculation,
            models=tuple(models.split(",")) if models else None,
            settings=flags.conversion.serve,
            allow_hash_mismatch=allow_hash_mismatch,
            allow_control=allow_control,
        )
    )
    raise typer.Exit(code)
