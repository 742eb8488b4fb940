"""Check a commit message: `scope: what` in at most 72 characters, an empty line, and a body that says why.

    python scripts/check_commit_message.py .git/COMMIT_EDITMSG

pre-commit runs it as a commit-msg hook. Merges, reverts and commits to be squashed are left alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_SUBJECT_CHARS = 72
SCISSORS = "# ------------------------ >8 ------------------------"
_MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
_SUBJECT = re.compile(r"[\w./-]+(, [\w./-]+)*: \S.*")


def problem_of(message: str) -> str | None:
    """Return what is wrong with the message, in one sentence; None if nothing is."""
    text = message.split(SCISSORS)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        del lines[0]
    if not lines:
        return "the message is empty; write `scope: what` and a body that says why"
    subject, rest = lines[0], lines[1:]
    if subject.startswith(_MADE_BY_GIT):
        return None
    if len(subject) > MAX_SUBJECT_CHARS:
        return f"the subject has {len(subject)} characters, at most {MAX_SUBJECT_CHARS} fit; move the rest to the body"
    if not _SUBJECT.fullmatch(subject):
        return f"the subject {subject!r} has no scope; write `scope: what`, such as `scheduler: count paused rows`"
    if rest and rest[0]:
        return "the line below the subject is not empty; leave it empty, so that git can tell subject and body apart"
    if not any(rest):
        return "the body is missing; say why, below an empty line"
    return None


def main(paths: list[str]) -> int:
    if len(paths) != 1:
        print(f"check_commit_message.py takes one file, it was given {len(paths)}", file=sys.stderr)
        return 2
    problem = problem_of(Path(paths[0]).read_text(encoding="utf-8"))
    if problem is not None:
        print(f"commit message: {problem}", file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
