"""TensorRT-LLM's LLM API and its OpenAI server, with our drafter. Contract-tested, not run against TensorRT-LLM.

trtllm-serve reads its configuration from a file, which cannot hold a drafter object; the LLM API accepts one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser_trtllm.config import read_mapping
from faser_trtllm.errors import ConfigError
from faser_trtllm.trtllm.drafter import check_parallel_sizes
from faser_trtllm.trtllm.gate import import_module, require_drafter

_OURS = ("model", "speculative_config")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the server. model: the target's checkpoint or name. llm: more arguments of the LLM API."""

    model: str
    host: str = "localhost"
    port: int = 8000
    llm: Mapping[str, Any] = field(default_factory=dict)


def open_llm(model: str, drafter: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Open tensorrt_llm.llmapi.LLM with a FaserDrafter. options: more arguments of LLM.

    Raises ConfigError for options that the drafter cannot work with, before anything is loaded.
    """
    options = dict(options or {})
    for name in _OURS:
        if name in options:
            raise ConfigError(f"{name} is given twice: it comes from the command and the drafter; leave it out")
    check_parallel_sizes(options)
    # TensorRT-LLM would turn its overlap scheduler off itself, with a warning.
    if options.setdefault("disable_overlap_scheduler", True) is not True:
        raise ConfigError(
            f"disable_overlap_scheduler is {options['disable_overlap_scheduler']}, and TensorRT-LLM does not overlap "
            "steps for a drafter of ours; leave it out"
        )
    make = import_module("tensorrt_llm.llmapi").LLM
    return make(model=model, speculative_config=drafter.decoding_config(), **options)


def serve(options: ServerOptions, drafter_options: Mapping[str, Any]) -> None:
    """Serve TensorRT-LLM's own OpenAI API until it is stopped. drafter_options: arguments of FaserDrafter."""
    require_drafter()
    from faser_trtllm.trtllm.drafter import FaserDrafter

    make_server = import_module("tensorrt_llm.serve").OpenAIServer
    drafter = FaserDrafter(**drafter_options)
    llm = open_llm(options.model, drafter, options.llm)
    try:
        server = make_server(llm, model=options.model, tool_parser=None, server_role=None, metadata_server_cfg=None)
        asyncio.run(server(options.host, options.port))
    finally:
        llm.shutdown()


def read_llm_options(path: Path | None) -> dict[str, Any]:
    """Read the YAML file of trtllm-serve's --config, None: {}; raise ConfigError if that fails."""
    return {str(name): value for name, value in read_mapping(path).items()} if path is not None else {}
