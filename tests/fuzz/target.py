"""A fuzz target and its oracle: documented errors only, and limits of CPU time and memory for each input."""

from __future__ import annotations

import contextlib
import gc
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.errors import FaserError

MAX_CPU_S = 1.0
MAX_MEMORY_BYTES = 256 << 20
MAX_INPUT_BYTES = 1 << 20
CORPUS = Path(__file__).parent / "corpus"

_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
_NOW = re.compile(r"VmRSS:\s+(\d+) kB")


class FindingError(Exception):
    """Raised for an input that breaks a rule of the oracle. key: equal for findings that likely have one cause."""

    def __init__(self, what: str, key: str) -> None:
        super().__init__(what)
        self.key = key


@dataclass(frozen=True)
class Codec:
    """The structure of an input, which mutations change: values of JSON, and bytes.

    decode may raise anything for what has no structure; encode may for what cannot be written.
    """

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True)
class Target:
    """A parser under test.

    run: parses an input and uses what it got. seeds: inputs that are accepted, made by the code itself. modules: files
    of the package whose coverage is the target's. errors: what the parser may raise. words: texts that are likely to
    matter. max_bytes: of an input.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    modules: tuple[str, ...]
    codec: Codec | None = None
    errors: tuple[type[BaseException], ...] = (FaserError,)
    words: tuple[str, ...] = ()
    max_bytes: int = MAX_INPUT_BYTES

    def inputs(self) -> list[bytes]:
        """Seeds and the kept corpus."""
        kept = sorted((CORPUS / self.name).glob("*"))
        return [*self.seeds(), *(path.read_bytes() for path in kept)]

    def check(self, data: bytes) -> None:
        """Run an input; raises FindingError."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
        before = _resident(_NOW)
        started_s = time.process_time()
        try:
            self.run(data)
        except self.errors:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a Rust library is none of Exception
            raise FindingError("".join(traceback.format_exception(error)), _key(error)) from error
        taken_s = time.process_time() - started_s
        num_bytes = _resident(_PEAK) - before
        if taken_s > MAX_CPU_S:  # on a shared machine some run takes three times as long, but hardly the same one twice
            started_s = time.process_time()
            with contextlib.suppress(*self.errors):
                self.run(data)
            taken_s = min(taken_s, time.process_time() - started_s)
        if taken_s > MAX_CPU_S:
            raise FindingError(f"{len(data)} bytes took {taken_s:.1f} s of CPU, allowed is {MAX_CPU_S}", "time")
        if num_bytes > MAX_MEMORY_BYTES:
            raise FindingError(
                f"{len(data)} bytes took {num_bytes >> 20} MiB, allowed are {MAX_MEMORY_BYTES >> 20}", "memory"
            )


def _resident(kind: re.Pattern[str]) -> int:
    found = kind.search(Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _key(error: BaseException) -> str:
    """Return the type of the error, and where in the package it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "faser_trtllm" in frame.filename] or list(frames)
    last = ours[-1]
    del frames
    gc.collect(0)
    return f"{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}"
