"""Tests that imitate a device or another product, which a run leaves out where nothing that they cover changed.

They run with `./build.sh test --all`, as in CI, where a path of theirs is given to pytest, and where a file that they
cover differs from the branch that this one comes from.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPSTREAM = "origin/main"

COVERED: Mapping[str, tuple[str, ...]] = {
    "tests/virtual_gpu": ("faser_trtllm/engine", "faser_trtllm/ops", "faser_trtllm/partition", "plugins"),
    "tests/ops/cuda": ("faser_trtllm/ops", "plugins/cuda"),
    "tests/engine/cuda": ("faser_trtllm/engine", "faser_trtllm/ops", "plugins"),
    "tests/engine/gpu": ("faser_trtllm/engine", "faser_trtllm/ops", "plugins"),
    "tests/engine/tensorrt": ("faser_trtllm/engine", "faser_trtllm/builder", "plugins"),
    "tests/builder/network": ("faser_trtllm/builder", "faser_trtllm/models"),
    "tests/builder/plugins": ("faser_trtllm/builder", "plugins/tensorrt", "plugins/cuda"),
    "tests/trtllm": ("faser_trtllm/trtllm", "lab/trtllm_check"),
    "tests/lab": ("lab", "faser_trtllm/policy", "faser_trtllm/scheduler", "faser_trtllm/builder/network"),
    "tests/benchmarks": ("benchmarks", "lab", "faser_trtllm/policy"),
}
"""Folder of tests -> the sources that it covers, next to itself and tests/support."""


def left_out(changed: Iterable[str] | None, asked_for: Iterable[str]) -> set[str]:
    """The folders of COVERED to leave out.

    changed: files that differ from upstream; None: unknown, so nothing is left out. asked_for: paths that pytest was
    called with; a folder runs if one of them is in it.
    """
    if changed is None:
        return set()
    files, paths = list(changed), list(asked_for)
    return {
        folder
        for folder, sources in COVERED.items()
        if not any(_is_in(path, folder) for path in paths)
        and not any(_is_in(file, source) for file in files for source in (folder, "tests/support", *sources))
    }


def changed_files() -> list[str] | None:
    """Files that differ from the commit where this branch left UPSTREAM, uncommitted ones included; None without git
    or upstream."""
    base = _git("merge-base", "HEAD", UPSTREAM)
    if base is None:
        return None
    differing, new = _git("diff", "--name-only", base.strip()), _git("ls-files", "--others", "--exclude-standard")
    return None if differing is None or new is None else [*differing.splitlines(), *new.splitlines()]


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
