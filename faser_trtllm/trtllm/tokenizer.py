"""A tokenizer that is named apart from the model: taken if it is the model's own, refused if it is another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser_trtllm.errors import ConfigError

_FILE = "tokenizer.json"


def check_tokenizer(build: Mapping[str, Any], directory: Path) -> None:
    """build: of a Conversion; directory: with the model's tokenizer.json. ConfigError if "tokenizer" is another one.

    A directory without tokenizer.json is left to whoever reads it.
    """
    named = build.get("tokenizer")
    own = directory / _FILE
    if named is None or not own.is_file():
        return
    other = Path(named) / _FILE
    if not other.is_file():
        raise ConfigError(
            f"tokenizer is {named}, which has no {_FILE} on this machine; leave it out, {directory} has one"
        )
    if other.read_bytes() != own.read_bytes():
        raise ConfigError(
            f"tokenizer is {named}, whose {_FILE} differs from that of {directory}; copy it to the target "
            "checkpoint and run faser build"
        )
