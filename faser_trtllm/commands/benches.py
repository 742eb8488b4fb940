"""`faser bench NAME`, which runs a module with main(argv) from the repository's `benchmarks` or from the package.

Benches are listed without being imported, with the first lines of their docstrings.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path

from faser_trtllm.checkout import ROOT, import_from_checkout, is_checkout
from faser_trtllm.commands.table import HELP_FLAGS, listing
from faser_trtllm.errors import InvalidArgumentError

PACKAGED = {"serve": "faser_trtllm/bench/serve/__main__.py", "golden": "faser_trtllm/bench/golden.py"}
ABOUT = "Benchmarks. golden and serve are installed; the others need a checkout."


def bench(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run a benchmark: peers, policies, the service, endurance, host, GPUs."""
    files = {**PACKAGED, **_files(root)}
    if not arguments or arguments[0] in HELP_FLAGS:
        print(listing("faser bench", ABOUT, bench_lines(root)))
        return 0 if arguments else 2
    name, *rest = arguments
    if name.startswith("-"):
        raise InvalidArgumentError(f"there is no option 'bench {name}'; `faser bench --help` lists the commands")
    if name not in files:
        if not is_checkout(root):
            import_from_checkout(name, f"bench {name!r}", root)
        raise InvalidArgumentError(f"there is no command 'bench {name}'; `faser bench --help` lists the commands")
    module = files[name].removesuffix(".py").replace("/", ".")
    found = (
        importlib.import_module(module) if name in PACKAGED else import_from_checkout(module, f"bench {name!r}", root)
    )
    return found.main(rest) or 0


def bench_lines(root: Path = ROOT) -> dict[str, str]:
    """Return the line of help of each bench by name, sorted."""
    files = {**PACKAGED, **_files(root)}
    return {name: _first_line(root / file) for name, file in sorted(files.items())}


def _files(root: Path) -> dict[str, str]:
    """Return the files of a checkout's benches by name, such as peers or peers.bits; {} outside a checkout."""
    found = {}
    for path in (root / "benchmarks").rglob("*.py") if is_checkout(root) else ():
        if "\ndef main(argv" in path.read_text():
            file = path.relative_to(root)
            found[".".join(file.with_suffix("").parts[1:]).removesuffix(".__main__")] = str(file)
    return found


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
