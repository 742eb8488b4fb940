"""Where the kernels of plugins/cuda wait for other threads or for their own copies: found in the sources."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from faser_trtllm.ops.cuda.compiler import source_dir

# Not shuffles and the like, which order no memory accesses.
_BARRIER = re.compile(r"\b__sync\w+\(|\bcp_async_wait<")
_UNKNOWN = re.compile(r"\bbar\.|barrier|fence|cooperative_groups|wait_all|__nanosleep", re.IGNORECASE)
# A fence makes nobody wait; what it orders, memory between blocks, is not modeled here.
_COMMENT = re.compile(r"//.*|\b__threadfence\(\)")


class Place(NamedTuple):
    """A line of a file, by its path behind plugins/cuda."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def barriers() -> list[Place]:
    """Every place where threads wait, in the order of the files, without untested()."""
    found = []
    for place, code in _lines():
        if place in untested():
            continue
        count = len(_BARRIER.findall(code))
        assert count < 2, f"{place} has {count} barriers; tests take one out by its line, so give each its own"
        found += [place] * count
    return found


@functools.cache
def untested() -> list[Place]:
    """Barriers whose absence shows in no case, by the comment next to each that says why it is kept."""
    return [place for place, line in _raw_lines() if "// untested:" in line]


def other_waits() -> list[Place]:
    """Return lines that may make threads wait and are not barriers that the tests can take out."""
    return [place for place, code in _lines() if _UNKNOWN.search(code)]


def _lines() -> Iterator[tuple[Place, str]]:
    return ((place, _COMMENT.sub("", line)) for place, line in _raw_lines())


def _raw_lines() -> Iterator[tuple[Place, str]]:
    for path in sorted(source_dir().rglob("*.cu*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield Place(str(path.relative_to(source_dir())), number), line
