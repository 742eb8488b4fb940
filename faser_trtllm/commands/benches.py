"""`faser bench NAME`, which runs a module with main(argv) from the repository's `benchmarks`.

Benches are listed without being imported, with the first lines of their docstrings.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from faser_trtllm.checkout import ROOT, import_from_checkout, require_checkout
from faser_trtllm.commands.table import HELP_FLAGS, listing
from faser_trtllm.errors import InvalidArgumentError

ABOUT = "Benchmarks, which need a checkout."


def bench(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run a benchmark: peers, policies, the service, endurance, host, GPUs."""
    name, *rest = arguments or ("",)
    what = f"bench {name!r}" if name and name not in HELP_FLAGS else "faser bench"
    require_checkout(what, root)
    if name in ("", *HELP_FLAGS):
        print(listing("faser bench", ABOUT, bench_lines(root)))
        return 0 if name else 2
    files = _files(root)
    if name not in files:
        kind = "option" if name.startswith("-") else "command"
        raise InvalidArgumentError(f"there is no {kind} 'bench {name}'; `faser bench --help` lists the commands")
    return import_from_checkout(files[name].removesuffix(".py").replace("/", "."), what, root).main(rest) or 0


def bench_lines(root: Path = ROOT) -> dict[str, str]:
    """Return a line of help for each bench, sorted by the bench's name."""
    files = _files(root)
    return {name: _first_line(root / file) for name, file in sorted(files.items())}


def _files(root: Path) -> dict[str, str]:
    """Map the name of each bench, such as peers or peers.bits, to its file, relative to root."""
    found = {}
    for path in (root / "benchmarks").rglob("*.py"):
        if "\ndef main(argv" in path.read_text():
            file = path.relative_to(root)
            found[".".join(file.with_suffix("").parts[1:]).removesuffix(".__main__")] = str(file)
    return found


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
