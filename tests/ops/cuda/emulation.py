"""The kernels of plugins/cuda on the CPU: compiled by the host compiler over the emulator, launched like a cubin.

In a process that ThreadSanitizer is loaded in they are compiled for it, and a race ends the process with its report.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.compiler import cache_dir, include_dirs, source_dir, source_of
from faser_trtllm.ops.cuda.driver import Argument, Dim3

EMULATOR_DIR = Path(__file__).parent / "emulator"
MAX_ARGUMENTS = 32


class EmulatedModule:
    """Launcher over host memory: arguments are addresses of CPU tensors; a launch ends before it returns.

    `order` is the order of a block's threads (0 ascending, 1 descending, else shuffled): results must not depend on it,
    nor on `shared_byte`, which fills shared memory before each block.
    """

    shared_byte = 0xFF  # NaNs

    def __init__(
        self, stem: str, defines: Mapping[str, int] | None = None, order: int = 0, sources: Path | None = None
    ) -> None:
        self._library = _library(stem, tuple(sorted((defines or {}).items())), sources or source_dir())
        self.order = order

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """Launch a kernel as Launcher.launch does."""
        assert len(arguments) <= MAX_ARGUMENTS
        # A pointer's value is None when it is null; a negative int32 keeps its low 32 bits.
        values = [(argument.value or 0) & 0xFFFF_FFFF_FFFF_FFFF for argument in arguments]
        self._library.emulator_fill_shared(self.shared_byte)
        self._library.emulator_launch(
            ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            (ctypes.c_uint64 * MAX_ARGUMENTS)(*values),
            ctypes.c_uint(self.order),
        )

    def leave_out(self, file: str, line: int) -> int:
        """Leave out the barrier in this line from now on (line 0: none); how often the one before was left out."""
        self._library.emulator_leave_out.restype = ctypes.c_uint64
        return int(self._library.emulator_leave_out(f"/{file}".encode(), line))


def emulated(
    stem: str, defines: Mapping[str, int] | None = None, order: int = 0, sources: Path | None = None
) -> EmulatedModule:
    """An EmulatedModule, or a skipped test where there is no host compiler or no CUDA headers."""
    skip_without_a_compiler()
    return EmulatedModule(stem, defines, order, sources)


def skip_without_a_compiler() -> None:
    if host_compiler() is None:
        pytest.skip("no host C++ compiler (CXX, c++) to emulate the kernels with")
    try:
        include_dirs()
    except FaserError as error:
        pytest.skip(str(error))


def host_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def is_sanitized() -> bool:
    """Return whether ThreadSanitizer is loaded in this process, which is possible only from its start."""
    return hasattr(ctypes.CDLL(None), "__tsan_init")


@functools.cache
def _library(stem: str, defines: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    flags = emulation_flags(defines, folder)
    if is_sanitized():
        flags += ["-fsanitize=thread", "-g1"]
    folders = dict.fromkeys((folder, source_dir()))
    headers = [path for place in folders for path in sorted(place.rglob("*.cuh"))]
    sources = [source_of(stem, folder), *headers, *sorted(EMULATOR_DIR.glob("*.h"))]
    return ctypes.CDLL(str(built(stem, ["-x", "c++", str(sources[0])], flags, sources, folder)))


def emulation_flags(defines: Iterable[tuple[str, int]], folder: Path) -> list[str]:
    """Return the host compiler's flags for a .cu file of this folder over the emulator."""
    # Without -fno-gnu-unique two builds of one stem would share static memory. Kernels read one type's bytes as
    # another's, which -O2 would otherwise take for separate memory.
    flags = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-fPIC", "-shared", "-fno-gnu-unique"]
    flags += ["-Wall", "-Wno-unknown-pragmas", "-Werror=return-type"]
    flags += [f"-D{name}={value}" for name, value in defines]
    places = dict.fromkeys((folder, source_dir(), EMULATOR_DIR))
    flags += [argument for place in places for argument in ("-I", str(place))]
    for include in include_dirs():
        flags += ["-isystem", str(include)]
    return flags


def built(
    name: str, inputs: Sequence[str], flags: Sequence[str], sources: Iterable[Path], folder: Path | None = None
) -> Path:
    """The library that the host compiler makes of the inputs; kept as long as flags and sources are the same.

    folder: one that may be another, such as a test's own, without need to compile what is in it again.
    """
    content = b"".join(path.read_bytes() for path in sources)
    said = repr((inputs, flags)).replace(str(folder or source_dir()), "")
    digest = hashlib.sha256(said.encode() + content).hexdigest()[:16]
    target = cache_dir() / "emulated" / f"{name}-{digest}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another of pytest's workers may be at it
        if not target.is_file():
            scratch = target.with_suffix(".tmp")
            command = [str(host_compiler()), *flags, "-o", str(scratch), *inputs]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(scratch, target)
    return target
