"""The Triton model repository: its models, and copies for the native edge and for models that are not decoupled."""

from __future__ import annotations

import os
import re
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError, reason_of
from faser_trtllm.serving.triton.contract import TOKEN_MODELS

_BACKEND = re.compile(r'^backend: "python"$', re.MULTILINE)
_DECOUPLED = re.compile(r"(decoupled\s*:\s*)true")


def choose_models(repository: Path, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """Folders of the repository to load, None: all but TOKEN_MODELS; InvalidArgumentError names a missing one."""
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
    return wanted or tuple(name for name in there if name not in TOKEN_MODELS)


def link_unary(repository: Path, directory: Path) -> Path:
    """Make `directory` a repository of the same models, not decoupled: one response per request, of infer too."""
    for config in repository.glob("*/config.pbtxt"):
        model = directory / config.parent.name
        model.mkdir(parents=True)
        for path in config.parent.iterdir():
            if path != config:
                (model / path.name).symlink_to(path)
        (model / config.name).write_text(_DECOUPLED.sub(r"\1false", config.read_text()))
    return directory


def native_repository(repository: Path, directory: Path) -> Path:
    """Write a repository like `repository` to directory: its models of ours run in the backend `faser`.

    A model is ours if its config.pbtxt has `backend: "python"` on a line of its own; others are linked as they are.
    """
    for config in sorted(repository.glob("*/config.pbtxt")):
        model, source = directory / config.parent.name, config.parent.absolute()
        text, count = _BACKEND.subn('backend: "faser"', config.read_text())
        if not count:
            directory.mkdir(parents=True, exist_ok=True)
            model.symlink_to(source)
            continue
        model.mkdir(parents=True)
        for entry in source.iterdir():
            if entry != source / config.name:
                (model / entry.name).symlink_to(entry)
        (model / config.name).write_text(text)
    return directory
