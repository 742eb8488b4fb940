"""`faser openai`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.config import BRANCHES, DRAFTERS, SPELLINGS

EXAMPLES = (
    "Examples: faser openai --engine_dir engines/built/demo; "
    "faser openai --url grpc://127.0.0.1:8001 --engine_dir engines/built/demo"
)


def openai(
    engine_dir: Annotated[
        Path | None, typer.Option("--engine_dir", help="engines to serve; with --url only their tokenizer is read")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="gRPC address of a running `faser serve`, such as grpc://host:port")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="port of the API")] = 9000,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    served_model_name: Annotated[
        str, typer.Option("--served_model_name", help="name that requests give as `model`")
    ] = "faser",
    chat_template: Annotated[
        Path | None, typer.Option("--chat_template", help="Jinja file; default: the template of the model")
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            "--tool_call_parser",
            "--tool-call-parser",
            help="parser of the model's function calls, or none; default: found from its chat template",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            "--reasoning_parser",
            "--reasoning-parser",
            help="parser of the model's reasoning, or none; default: found from its chat template",
        ),
    ] = None,
    per_request_spec_decode_metrics: Annotated[
        str,
        typer.Option(
            "--per_request_spec_decode_metrics",
            "--per-request-spec-decode-metrics",
            help="metrics.speculative_decoding in each answer: none, summary, or detailed (with numbers per step)",
        ),
    ] = "none",
    max_body_bytes: Annotated[
        int | None, typer.Option("--max_body_bytes", help="largest request body; default: 4 MiB")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api_key",
            envvar="FASER_API_KEY",
            show_envvar=False,
            help="key that requests to /v1 must carry; set FASER_API_KEY instead to keep it out of `ps`",
        ),
    ] = None,
    allow_no_key: Annotated[
        bool, typer.Option("--allow_no_key", help="allow addresses other than loopback without a key")
    ] = False,
    max_connections: Annotated[int, typer.Option("--max_connections", help="most clients connected at a time")] = 4096,
    stream_padding: Annotated[
        int,
        typer.Option(
            "--stream_padding",
            help="pad events of a stream to a multiple of this many bytes, so that their sizes do not reveal the text; "
            "0: only where a client sets stream_options.include_obfuscation",
        ),
    ] = 0,
    allowed_origins: Annotated[
        str | None,
        typer.Option("--allowed_origins", help="web origins whose pages may call the API, separated by commas, or *"),
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option("--metrics_url", help="with --url: address of the metrics that /metrics passes on")
    ] = None,
    http_port: Annotated[int, typer.Option("--http_port", help="HTTP port of the Triton server to start")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port", help="gRPC port of the Triton server to start")] = 8001,
    metrics_port: Annotated[
        int, typer.Option("--metrics_port", help="metrics port of the Triton server to start")
    ] = 8002,
    config: Annotated[Path | None, typer.Option("--config", help="faser.yaml of the Triton server to start")] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
    drafters: Annotated[str | None, typer.Option("--drafters", help=DRAFTERS)] = None,
    num_branches: Annotated[int | None, typer.Option("--num_branches", help=BRANCHES)] = None,
) -> None:
    """Serve OpenAI's completions and chat API in front of Triton.

    Uses the Triton server at --url, or starts one for --engine_dir.
    """
    from faser_trtllm.serving.launch.options import ServeOptions
    from faser_trtllm.serving.openai.server import OpenAIOptions, serve_openai

    triton = ServeOptions(
        engine_dir=engine_dir,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        config=config,
        speculation=speculation,
        drafters=drafters,
        num_branches=num_branches,
    )
    options = OpenAIOptions(
        url=url,
        host=host,
        port=port,
        served_model_name=served_model_name,
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        per_request_spec_decode_metrics=per_request_spec_decode_metrics,
        max_body_bytes=max_body_bytes,
        api_key=api_key,
        allow_no_key=allow_no_key,
        max_connections=max_connections,
        stream_padding=stream_padding,
        allowed_origins=tuple(allowed_origins.split(",")) if allowed_origins else (),
        metrics_url=metrics_url,
        triton=triton,
    )
    raise typer.Exit(serve_openai(options))
