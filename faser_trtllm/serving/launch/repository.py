"""The Triton model repository: its models, and a copy for models that are not decoupled."""

from __future__ import annotations

import os
import re
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError, reason_of

_DECOUPLED = re.compile(r"(decoupled\s*:\s*)true")


def choose_models(repository: Path, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the folders of the repository to load: `wanted`, or all; raise InvalidArgumentError."""
    try:
        os.listdir(repository)
    except OSError as error:
        raise InvalidArgumentError(
            f"model_repo {repository} cannot be read: {reason_of(error)}; name another with --model_repo"
        ) from error
    there = tuple(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))
    for name in wanted or ():
        if name not in there:
            raise InvalidArgumentError(
                f"models has {name!r}, the model repository has {', '.join(there) or 'none'}; name one of these"
            )
    return wanted or there


def link_unary(repository: Path, directory: Path) -> Path:
    """Link the models into `directory` with `decoupled: false`, for one response per request; return `directory`."""
    for config in repository.glob("*/config.pbtxt"):
        model = directory / config.parent.name
        model.mkdir(parents=True)
        for path in config.parent.iterdir():
            if path != config:
                (model / path.name).symlink_to(path)
        (model / config.name).write_text(_DECOUPLED.sub(r"\1false", config.read_text()))
    return directory
