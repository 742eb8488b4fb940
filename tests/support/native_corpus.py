"""Kept inputs of the native fuzz targets: a text file for each target, an input a line in base64."""

from __future__ import annotations

import base64
from pathlib import Path

from tests.support.native_build import HERE

CORPUS = HERE / "fuzz" / "corpus"


def unpack(target: str, folder: Path) -> Path:
    """The folder with a file for each kept input, as fuzzers read it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate((CORPUS / f"{target}.txt").read_text().splitlines()):
        (folder / f"kept-{number}").write_bytes(base64.b64decode(line))
    return folder


def pack(target: str, folder: Path) -> None:
    """Keeps the folder's files in place of what was kept."""
    lines = sorted({base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()})
    CORPUS.mkdir(parents=True, exist_ok=True)
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))
