"""Refuse large files: git keeps every version of them for good.

    python scripts/check_file_sizes.py FILE...

pre-commit runs it on what is about to be committed. The bundled demo pair is the exception.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_BYTES = 1 << 20
ALLOWED = ("engines/demo/",)


def problem_of(path: str) -> str | None:
    """What is wrong with the file, in one sentence; None if nothing is."""
    if path.startswith(ALLOWED) or not Path(path).is_file():
        return None
    num_bytes = Path(path).stat().st_size
    if num_bytes <= MAX_BYTES:
        return None
    return f"{path} has {num_bytes} bytes, at most {MAX_BYTES} are allowed; generate it, or keep it elsewhere"


def main(paths: list[str]) -> int:
    problems = [problem for problem in map(problem_of, paths) if problem is not None]
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
