"""Parts of the repository that no server runs and no wheel has: `benchmarks` and `lab`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from faser_trtllm.errors import FaserError

ROOT = Path(__file__).resolve().parents[1]


def require_checkout(what: str, root: Path = ROOT) -> None:
    """Raise a FaserError about `what` if the package is installed without its repository."""
    if not (root / "pyproject.toml").is_file():  # an installed package may lie next to any package called benchmarks
        raise FaserError(
            f"{what} is not part of the installed package; clone the repository and run it from there after "
            "./build.sh setup"
        )


def import_from_checkout(module: str, what: str, root: Path = ROOT) -> ModuleType:
    """Import a module of `benchmarks` or `lab`; raise a FaserError about `what` without a checkout.

    The checkout is on the import path of this process and its children afterwards.
    """
    require_checkout(what, root)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    inherited = os.environ.get("PYTHONPATH", "")
    if str(root) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), inherited)))
    return importlib.import_module(module)
