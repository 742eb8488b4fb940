"""`faser bench NAME`, which runs a module with main(argv) from the repository's `benchmarks` or from the package.

Benches are listed without being imported, with the first lines of their docstrings.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from faser_trtllm.commands.table import HELP_FLAGS, listing
from faser_trtllm.errors import FaserError, InvalidArgumentError

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = {"serve": "faser_trtllm/bench/serve/__main__.py", "golden": "faser_trtllm/bench/golden.py"}
ABOUT = "Benchmarks. golden and serve are installed; the others need a checkout."


def bench(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run a benchmark: peers, policies, the service, endurance, host, GPUs."""
    files = {**PACKAGED, **_files(root)}
    if not arguments or arguments[0] in HELP_FLAGS:
        print(listing("faser bench", ABOUT, bench_lines(root)))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in files:
        what = "option" if name.startswith("-") else "command"
        if what == "command" and not _is_checkout(root):
            raise FaserError(
                f"bench {name!r} is not part of the installed package; clone the repository and run it from there "
                "after ./build.sh setup"
            )
        raise InvalidArgumentError(f"there is no {what} 'bench {name}'; `faser bench --help` lists the commands")
    if name not in PACKAGED:
        _make_importable(root)
    module = importlib.import_module(files[name].removesuffix(".py").replace("/", "."))
    return module.main(rest) or 0


def bench_lines(root: Path = ROOT) -> dict[str, str]:
    """Return the line of help of each bench by name, sorted."""
    files = {**PACKAGED, **_files(root)}
    return {name: _first_line(root / file) for name, file in sorted(files.items())}


def _files(root: Path) -> dict[str, str]:
    """Return the files of a checkout's benches by name, such as peers or peers.bits; {} outside a checkout."""
    found = {}
    for path in (root / "benchmarks").rglob("*.py") if _is_checkout(root) else ():
        if "\ndef main(argv" in path.read_text():
            file = path.relative_to(root)
            found[".".join(file.with_suffix("").parts[1:]).removesuffix(".__main__")] = str(file)
    return found


def _is_checkout(root: Path) -> bool:
    # An installed package may lie next to any other package that is called benchmarks.
    return (root / "pyproject.toml").is_file()


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _make_importable(root: Path) -> None:
    """Put the checkout on the import path of this process and its children."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    inherited = os.environ.get("PYTHONPATH", "")
    if str(root) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), inherited)))
