"""`faser serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import FOREIGN_FLAGS, own_flags
from faser_trtllm.config import BRANCHES, DETERMINISTIC, DRAFTERS, SPELLINGS
from faser_trtllm.errors import InvalidArgumentError

CONTEXT = FOREIGN_FLAGS
EXAMPLES = (
    "Examples: faser serve --engine_dir engines/built/demo --http_port 8000 --grpc_port 8001; "
    "faser serve engines/built/demo --config trtllm.yaml --max_batch_size 16. Flags and YAML of trtllm-serve are "
    "accepted, too; those without a counterpart are refused by name."
)


def serve(
    ctx: typer.Context,
    engine_dir: Annotated[
        Path | None,
        typer.Option(
            "--engine_dir",
            help="engines to serve, also as an argument without the flag; default: engine_dir of --config",
        ),
    ] = None,
    http_port: Annotated[int, typer.Option("--http_port", "--port", help="port of Triton's HTTP API")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port", help="port of Triton's gRPC API")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics_port", help="port of the Prometheus metrics")] = 8002,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", "--extra_llm_api_options", help="a faser.yaml, or a configuration of TensorRT-LLM"
        ),
    ] = None,
    model_repo: Annotated[
        Path | None, typer.Option("--model_repo", help="Triton model repository; default: the packaged one")
    ] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
    drafters: Annotated[str | None, typer.Option("--drafters", help=DRAFTERS)] = None,
    num_branches: Annotated[int | None, typer.Option("--num_branches", help=BRANCHES)] = None,
    deterministic: Annotated[bool | None, typer.Option("--deterministic", help=DETERMINISTIC)] = None,
    models: Annotated[
        str | None,
        typer.Option("--models", help="models to load, which share one engine; default: all"),
    ] = None,
    decoupled: Annotated[
        str,
        typer.Option(
            "--decoupled",
            help="true, or false for one response per request without streaming, for clients that call infer",
        ),
    ] = "true",
    allow_hash_mismatch: Annotated[
        bool,
        typer.Option("--allow_hash_mismatch", help="serve engine files that differ from manifest.json"),
    ] = False,
    allow_control: Annotated[
        bool,
        typer.Option(
            "--allow_control",
            help="let anyone who reaches the ports load models, register shared memory and set logs and traces; "
            "without it they need the key in FASER_CONTROL_KEY or in the file FASER_CONTROL_KEY_FILE",
        ),
    ] = False,
    allow_vulnerable_triton: Annotated[
        bool,
        typer.Option(
            "--allow_vulnerable_triton",
            help="listen beyond loopback with a tritonserver that has known vulnerabilities",
        ),
    ] = False,
) -> None:
    """Serve engines with NVIDIA Triton until SIGTERM, then drain."""
    from faser_trtllm.serving.launch.launcher import serve as run
    from faser_trtllm.serving.launch.options import ServeOptions
    from faser_trtllm.trtllm.convert.flags import SERVE_FLAGS, judge_flags
    from faser_trtllm.trtllm.convert.tokenizer import check_tokenizer

    if decoupled.lower() not in ("true", "false"):
        raise InvalidArgumentError(f"decoupled is {decoupled!r}, allowed is true or false")
    flags = judge_flags(ctx.args, SERVE_FLAGS, own_flags(ctx))
    positional = flags.without("serve", is_named=engine_dir is not None)
    if len(positional) > (engine_dir is None):
        raise InvalidArgumentError(f"{positional[-1]!r} is one argument too many; name one engine directory")
    if positional:
        engine_dir = Path(positional[0])
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
            drafters=drafters,
            num_branches=num_branches,
            deterministic=deterministic,
            decoupled=decoupled.lower() == "true",
            settings=flags.conversion.serve,
            allow_hash_mismatch=allow_hash_mismatch,
            allow_control=allow_control,
            allow_vulnerable_triton=allow_vulnerable_triton,
        )
    )
    raise typer.Exit(code)
