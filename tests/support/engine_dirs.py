"""Directories with engines of random pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.checkpoints import make_pair


def make_engine_dir(directory: Path, chat_template: str | None = None, num_layers: int = 2, **options: Any) -> Path:
    """Engines of a random target and draft model in directory/engine. options: of BuildOptions."""
    target, draft = make_pair(directory, num_layers=num_layers)
    if chat_template is not None:
        (target / "chat_template.jinja").write_text(chat_template)
    build_engines(BuildOptions(target, draft, directory / "engine", **options))
    return directory / "engine"
