"""Check that a tokenizer named separately from the model is the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser_trtllm.errors import ConfigError

_FILE = "tokenizer.json"


def check_tokenizer(build: Mapping[str, Any], directory: Path) -> None:
    """Raise ConfigError if build["tokenizer"] differs from the tokenizer.json in directory.

    build: Conversion.build. A directory without tokenizer.json is not checked here.
    """
    named = build.get("tokenizer")
    own = directory / _FILE
    if named is None or not own.is_file():
        return
    other = Path(named) / _FILE
    if not other.is_file():
        raise ConfigError(
            f"tokenizer is {named}, which has no {_FILE} on this machine; leave it out, {directory} has its own"
        )
    if other.read_bytes() != own.read_bytes():
        raise ConfigError(
            f"tokenizer is {named}, whose {_FILE} differs from that of {directory}; copy it to the target "
            "checkpoint and run faser build"
        )
