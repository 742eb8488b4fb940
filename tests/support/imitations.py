"""Tests that imitate a device or another product, and large ones, which a run leaves out where nothing that they cover
changed.

They run with `./build.sh test --all`, as in CI, where pytest is given their path or a part of `tests` with them, and
where a file that they cover differs from the branch that this one comes from.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

_SERVICE = (
    *(f"faser_trtllm/{name}" for name in ("config.py", "core", "executor", "guided", "models", "scheduler", "serving")),
    "plugins/triton",
    "triton_model_repo",
)
"""Sources of the service, for tests of what happens when its parts fail, or hold each other up."""

_POLICY = ("faser_trtllm/core", "faser_trtllm/ops", "faser_trtllm/policy", "tests/policy/world.py")

ROOT = Path(__file__).parents[2]
UPSTREAM = "origin/main"

COVERED: Mapping[str, tuple[str, ...]] = {
    "tests/virtual_gpu": ("faser_trtllm/engine", "faser_trtllm/ops", "faser_trtllm/partition", "plugins"),
    "tests/ops/cuda": ("faser_trtllm/ops", "lab/reference", "plugins/cuda"),
    "tests/engine/cuda": ("faser_trtllm/engine", "faser_trtllm/ops", "plugins"),
    "tests/engine/gpu": ("faser_trtllm/engine", "faser_trtllm/ops", "plugins"),
    "tests/engine/tensorrt": ("faser_trtllm/engine", "faser_trtllm/builder", "plugins"),
    "tests/builder/network": ("faser_trtllm/builder", "faser_trtllm/models"),
    "tests/builder/plugins": ("faser_trtllm/builder", "plugins/tensorrt", "plugins/cuda"),
    "tests/trtllm": ("faser_trtllm/trtllm", "lab/trtllm_check"),
    "tests/lab": ("lab", "faser_trtllm/policy", "faser_trtllm/scheduler", "faser_trtllm/builder/network"),
    "tests/benchmarks": ("benchmarks", "lab", "faser_trtllm/policy"),
    "tests/builder/test_fp8_build.py": ("faser_trtllm/builder", "faser_trtllm/models", "lab/interpreted"),
    "tests/builder/test_rtx_gpus.py": ("faser_trtllm/builder", "faser_trtllm/commands", "tests/virtual_gpu/device"),
    "tests/builder/test_tensorrt_build.py": ("faser_trtllm/builder", "faser_trtllm/models", "plugins/tensorrt"),
    "tests/fuzz": ("faser_trtllm",),
    "tests/native": ("faser_trtllm/builder", "faser_trtllm/native", "plugins/cpu", "plugins/triton"),
    "tests/ops/test_refresh_exactness.py": ("faser_trtllm/ops", "lab/reference"),
    "tests/ops/test_tree_exactness.py": ("faser_trtllm/ops", "lab/reference"),
    "tests/policy/test_block_price.py": _POLICY,
    "tests/policy/test_price.py": _POLICY,
    "tests/scripts/test_train_heads.py": ("engines/demo", "faser_trtllm/models"),
    "tests/serving/bystander": (*_SERVICE, "benchmarks/bystander"),
    "tests/serving/engine_process/test_health.py": _SERVICE,
    "tests/serving/launch/test_hang.py": _SERVICE,
    "tests/serving/launch/test_restart.py": _SERVICE,
    "tests/serving/reliability/test_faulty.py": _SERVICE,
    "tests/serving/reliability/test_server.py": _SERVICE,
    "tests/serving/traces": ("faser_trtllm", "plugins/cpu", "plugins/triton", "triton_model_repo"),
    "tests/serving/triton/test_faults.py": _SERVICE,
}
"""Tests -> the sources that they cover, next to themselves and tests/support."""


def left_out(changed: Iterable[str] | None, asked_for: Iterable[str]) -> set[str]:
    """The tests of COVERED to leave out.

    changed: files that differ from upstream; None: unknown, so nothing is left out. asked_for: paths that pytest was
    called with; tests run if one of them is in their folder, or a folder of theirs below `tests`.
    """
    if changed is None:
        return set()
    files, paths = list(changed), list(asked_for)
    return {
        tests
        for tests, sources in COVERED.items()
        if not any(_is_in(path, tests) or (path != "tests" and _is_in(tests, path)) for path in paths)
        and not any(_is_in(file, source) for file in files for source in (tests, "tests/support", *sources))
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
