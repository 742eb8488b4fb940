"""Refuse large files, and large folders of results: git keeps every version of them for good.

    python scripts/check_file_sizes.py FILE...

pre-commit runs it on what is about to be committed. The bundled demo pair is the exception.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 1 << 20
FOLDERS = ("docs/results/", "docs/figures/")
MAX_FOLDER_BYTES = 1 << 20  # per folder: raw reports do not belong in the repository
ALLOWED = ("engines/demo/",)


def problem_of(path: str) -> str | None:
    """Return what is wrong with the file, in one sentence; None if nothing is."""
    if path.startswith(ALLOWED) or not Path(path).is_file():
        return None
    num_bytes = Path(path).stat().st_size
    if num_bytes <= MAX_BYTES:
        return None
    return f"{path} has {num_bytes} bytes, at most {MAX_BYTES} are allowed; generate it, or keep it elsewhere"


def problem_of_folder(folder: str, paths: Sequence[str]) -> str | None:
    """Return what is wrong with the folder, if one of the files is in it; None otherwise."""
    if not any(path.startswith(folder) for path in paths):
        return None
    num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    if num_bytes <= MAX_FOLDER_BYTES:
        return None
    return f"{folder} has {num_bytes} bytes, at most {MAX_FOLDER_BYTES} are allowed; keep tables and plots only"


def main(paths: list[str]) -> int:
    problems = [problem_of(path) for path in paths] + [problem_of_folder(folder, paths) for folder in FOLDERS]
    for problem in filter(None, problems):
        print(problem, file=sys.stderr)
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
