"""The model repository for the native edge: that of the Python edge, with the backend `faser`."""

from __future__ import annotations

import re
from pathlib import Path

_BACKEND = re.compile(r'^backend: "python"$', re.MULTILINE)


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
