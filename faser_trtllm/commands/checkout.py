"""The benchmarks that are in the repository and not in the wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from faser_trtllm.errors import FaserError


def use_benchmarks(root: Path | None = None) -> None:
    """Make the package `benchmarks` of the checkout importable, here and in child processes.

    root: the repository; default: where this package lies. Raises FaserError where that is not a checkout.
    """
    root = root or Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__init__.py").is_file():
        raise FaserError(
            "this benchmark is not part of the installed package; clone the repository and run it from there after "
            "./build.sh setup"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    inherited = os.environ.get("PYTHONPATH", "")
    if str(root) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), inherited)))
