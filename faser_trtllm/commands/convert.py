"""`faser convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = "Example: faser convert --config trtllm.yaml --json; faser convert --config trtllm.yaml --output faser.yaml"


def convert(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            "--extra_llm_api_options",
            help="YAML of the LLM API, an engine's config.json, or a build_config",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print the report as one JSON object")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="write the resulting faser.yaml")] = None,
) -> None:
    """Convert a TensorRT-LLM configuration and report on each key.

    A key is used by faser build or faser serve, ignored with a reason, or refused with exit code 2.
    """
    import yaml

    from faser_trtllm.config import ServiceConfig, parse, read_mapping
    from faser_trtllm.errors import ConfigError, reason_of
    from faser_trtllm.trtllm.convert.convert import convert as convert_mapping

    conversion = convert_mapping(read_mapping(config))
    print(json.dumps(conversion.as_dict()) if as_json else conversion.as_text())
    conversion.check()
    parse(ServiceConfig, dict(conversion.serve))
    if output is not None:
        try:
            output.write_text(yaml.safe_dump(dict(conversion.serve), sort_keys=False))
        except OSError as error:
            raise ConfigError(f"output {output} cannot be written: {reason_of(error)}") from error
