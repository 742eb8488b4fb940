"""`faser trtllm-serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import EngineDirOption, numbers

EXAMPLES = (
    "Example: faser trtllm-serve engines/demo/target --engine_dir engines/built/demo --max_draft_len 4 --cores 0,1. "
    "Needs tensorrt-llm 1.2.x, 1.3.0rc or 1.4.0rc and one GPU."
)


def trtllm_serve(
    model: Annotated[str, typer.Argument(help="the target: a checkpoint folder, or a name on Hugging Face's Hub")],
    engine_dir: EngineDirOption,
    max_draft_len: Annotated[int, typer.Option("--max_draft_len", help="most drafts per request and step")] = 4,
    speculation: Annotated[
        str, typer.Option("--speculation", help="policy; default: price with --cost_table, else fixed:max_draft_len")
    ] = "",
    cost_table: Annotated[
        Path | None, typer.Option("--cost_table", help="a profile.json with the target's verify times, for price")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option("--max_concurrency", help="do not speculate while more requests are active")
    ] = None,
    cores: Annotated[str, typer.Option("--cores", help="cores for a draft on the CPU, such as 0,1; default: all")] = "",
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="threads for a draft on the CPU")] = None,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "localhost",
    port: Annotated[int, typer.Option("--port", help="port of the OpenAI API")] = 8000,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="tokenizer; default: the target's")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", "--extra_llm_api_options", help="YAML of the LLM API, without speculative_config"
        ),
    ] = None,
) -> None:
    """Run TensorRT-LLM's own OpenAI server with our drafter."""
    from faser_trtllm.trtllm.llm import ServerOptions, read_llm_options, serve

    llm = read_llm_options(config) | ({"tokenizer": tokenizer} if tokenizer is not None else {})
    drafter = {
        "engine_dir": engine_dir,
        "max_draft_len": max_draft_len,
        "speculation": speculation,
        "cost_table": cost_table,
        "max_concurrency": max_concurrency,
        "cores": numbers("--cores", cores) or None,
        "num_threads": num_threads,
    }
    serve(ServerOptions(model, host, port, llm), drafter)
