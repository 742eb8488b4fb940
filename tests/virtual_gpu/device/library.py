"""The stand-in for libcuda.so.1, and the images of emulated kernels that it loads in place of cubins."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from faser_trtllm.engine.gpu.runtime import MIN_TORCH
from faser_trtllm.errors import FaserError, install
from faser_trtllm.ops.cuda.compiler import Compiled, include_dirs, source_dir, source_of
from tests.ops.cuda.emulation import EMULATOR_DIR, built, emulation_flags, host_compiler

DRIVER_DIR = Path(__file__).parent / "driver"
MAGIC = "kernels for the virtual GPU"

_ENTRY = re.compile(r'extern "C" __attribute__\(\(visibility\("default"\)\)\) void\s+(\w+)\s*\(([^)]*)\)\s*{')


def why_not() -> str:
    """Why there can be no virtual GPU here; empty if there can."""
    if sys.platform != "linux" or host_compiler() is None:
        return "the virtual GPU needs Linux and a C++ compiler (CXX, c++)"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return f"the virtual GPU needs cuda-bindings; {install('cuda')}"
    try:
        include_dirs()
    except FaserError as error:
        return str(error)
    found = tuple(map(int, version("torch").split("+")[0].split(".")[:2])) if importlib.util.find_spec("torch") else ()
    return "" if found >= MIN_TORCH else f"the virtual GPU needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer"


@functools.cache
def driver_library() -> Path:
    """libcuda.so.1 by its SONAME, so that who has loaded it is what the bindings find; built on demand."""
    sources = sorted(DRIVER_DIR.glob("*.cpp"))
    flags = ["-shared", "-fPIC", "-std=c++17", "-O1", "-Wall", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
    return built("libcuda", [*map(str, sources), "-ldl", "-lpthread"], flags, [*sources, DRIVER_DIR / "driver.h"])


def compile_stem(stem: str, arch: str, kind: str = "cubin", defines: Mapping[str, int | str] | None = None) -> Compiled:
    """In place of ops.cuda.compiler.compile_stem: an image for cuLibraryLoadData instead of a cubin."""
    assert kind == "cubin"
    image = _image(stem, tuple((name, int(value)) for name, value in (defines or {}).items()))
    return Compiled(stem, arch, kind, image, ())


@functools.cache
def _image(stem: str, defines: tuple[tuple[str, int], ...]) -> Path:
    flags = emulation_flags(defines, source_dir())
    sources = [source_of(stem), *sorted(source_dir().rglob("*.cuh")), *sorted(EMULATOR_DIR.glob("*.h"))]
    inputs = ["-x", "c++", str(sources[0])]
    library = built(stem, inputs, flags, sources)
    image = library.with_suffix(".image")
    if not image.is_file():
        done = subprocess.run([str(host_compiler()), *flags, "-E", "-P", *inputs], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        scratch = image.with_suffix(f".{os.getpid()}")
        scratch.write_text("\n".join([MAGIC, str(library), *_kernels(done.stdout)]) + "\n")
        scratch.replace(image)
    return image


def _kernels(preprocessed: str) -> list[str]:
    """A line per kernel: its name and a letter per parameter: a pointer, a condition's handle or an int."""
    found = _ENTRY.findall(preprocessed)
    assert found
    return [
        f"{name} {''.join(_letter(parameter) for parameter in parameters.split(','))}"
        for name, parameters in found
        if name != "emulator_launch"
    ]


def _letter(parameter: str) -> str:
    return "p" if "*" in parameter else "h" if "cudaGraphConditionalHandle" in parameter else "i"


class Driver:
    """The stand-in's own calls, of the library that this process has loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(driver_library()), mode=ctypes.RTLD_GLOBAL)
        self._library.virtual_gpu_counters.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        self._library.virtual_gpu_is_live.argtypes = [pointer, ctypes.c_size_t, ctypes.c_char_p]
        self._library.virtual_gpu_host_function.argtypes = [pointer, pointer, pointer, ctypes.c_char_p]
        self._library.virtual_gpu_torch_host_alloc.argtypes = [pointer, ctypes.c_size_t]
        self._library.virtual_gpu_torch_host_used.argtypes = [pointer, pointer]
        self.torch_host_free = self._library.virtual_gpu_torch_host_free
        self.torch_host_free.argtypes = [pointer]

    def label(self, name: str) -> None:
        """Label this thread's next copy or wait."""
        self._library.virtual_gpu_label(name.encode())

    def run(self, stream: int, function: Any, number: int, label: str) -> int:
        """Queue function(number), a ctypes callback; the status."""
        return int(self._library.virtual_gpu_host_function(stream, function, number, label.encode()))

    def check_memory(self, user: str, address: int, num_bytes: int) -> None:
        """FaserError unless all of it lies within one live block of memory."""
        if self._library.virtual_gpu_is_live(address, num_bytes, user.encode()):
            raise FaserError(f"{user} uses {num_bytes} bytes that are not allocated")

    def torch_host_alloc(self, num_bytes: int) -> int:
        """The address of page-locked memory of torch's, which torch_host_free frees."""
        address = ctypes.c_void_p()
        if status := self._library.virtual_gpu_torch_host_alloc(ctypes.byref(address), num_bytes):
            raise FaserError(f"torch cannot have {num_bytes} bytes of page-locked memory, status {status}")
        return int(address.value or 0)

    def torch_host_used(self, address: int, stream: int) -> None:
        """Note a copy that the host does not wait for; do nothing where the memory is not torch's."""
        self._library.virtual_gpu_torch_host_used(address, stream)

    def seed(self, seed: int) -> None:
        """Seed the order of work from here on."""
        self._library.virtual_gpu_seed(ctypes.c_uint64(seed))

    def fail(self) -> None:
        """A host function could not do its work: later calls say so."""
        self._library.virtual_gpu_fail()

    def counters(self) -> str:
        text: bytes = self._library.virtual_gpu_counters()
        return text.decode()


@functools.cache
def driver() -> Driver:
    return Driver()
