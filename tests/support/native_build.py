"""The programs of tests/native: the native code compiled by the host's compiler with sanitizers, file by file.

Objects and programs are kept in build/native by the hash of all that goes into them, so only what changed is compiled.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "native"
PLUGINS = ROOT / "plugins"
BUILD = ROOT / "build" / "native"

_TRITON_INCLUDES = [PLUGINS / "triton", HERE / "triton", HERE / "fuzz"]
_CPU_INCLUDES = [
    *(PLUGINS / "cpu" / part for part in (".", "attention", "drafting", "engine", "kernels", "sampling")),
    HERE / "cpu",
    HERE / "fuzz",
]  # both plugins have an engine.h
_FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-math-errno", "-Wall"]
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni"))]
_ISA_FLAGS = {
    "kernels_avx2": _AVX2,
    "kernels_avx512bf16": _AVX512,
    "kernels_amxbf16": ["-mamx-tile", "-mamx-bf16", *_AVX512],
}
"""Compiler flags of the kernels' instruction sets, as in plugins/CMakeLists.txt."""

_TRITON = ["plugins/triton/*.cpp", "tests/native/triton/stub_triton.cpp"]
_CPU = ["plugins/cpu/**/*.cpp"]
_SOURCES = {
    "drive_backend": ["tests/native/triton/drive_backend.cpp", *_TRITON],
    "break_rules": ["tests/native/triton/break_rules.cpp", *_TRITON],
    "stub_engine": ["tests/native/triton/stub_engine.cpp"],
    "drive_cpu": ["tests/native/cpu/drive_cpu.cpp", *_CPU],
    "libfaser_cpu.so": _CPU,
    **{
        f"fuzz_{name}": [f"tests/native/fuzz/fuzz_{name}.cpp", *_TRITON]
        for name in ("engine_frames", "metrics", "requests", "responses")
    },
    **{f"fuzz_{name}": [f"tests/native/fuzz/fuzz_{name}.cpp", *_CPU] for name in ("engine", "sampling", "suffix")},
}
_LINK_FLAGS = {
    "fuzz_engine_frames": ["-Wl,--wrap=socketpair,--wrap=posix_spawnp,--wrap=waitpid,--wrap=kill"],
    "libfaser_cpu.so": ["-shared"],
}

FUZZ_TARGETS = tuple(name for name in _SOURCES if name.startswith("fuzz_"))


@dataclass(frozen=True)
class NativeBuild:
    """sanitize: as -fsanitize takes it. compiler: by default CXX or c++. libfuzzer: fuzz targets are clang's."""

    sanitize: str
    compiler: str = os.environ.get("CXX", "c++")
    libfuzzer: bool = False
    coverage: bool = False

    def why_not(self) -> str:
        """Return why nothing can be compiled so here, or an empty string if it can."""
        if shutil.which(self.compiler) is None:
            return f"no C++ compiler ({self.compiler})"
        program = "int main() {}"
        flags = [f"-fsanitize={self.sanitize}", "-x", "c++", "-", "-o", "/dev/null"]
        done = subprocess.run([self.compiler, *flags], input=program, capture_output=True, text=True)
        return "" if done.returncode == 0 else f"{self.compiler} cannot link with -fsanitize={self.sanitize}"

    def program(self, name: str) -> Path:
        """The program, compiled if need be; AssertionError with the compiler's words if that fails."""
        sources = sorted({path for pattern in _SOURCES[name] for path in ROOT.glob(pattern)})
        if name in FUZZ_TARGETS and not self.libfuzzer:
            sources.append(HERE / "fuzz" / "main.cpp")
        link_flags = [*self._sanitizer_flags(name), *_LINK_FLAGS.get(name, []), "-lpthread"]
        if name in FUZZ_TARGETS and self.libfuzzer:
            link_flags.append("-fsanitize=fuzzer")
        with _locked(self.sanitize), ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(functools.partial(self._object, name), sources))
            program = BUILD / f"{name}-{_hash(*map(str, objects), *link_flags, self.compiler)}"
            if not program.exists():
                self._run([*map(str, objects), *link_flags], program)
        return program

    def _sanitizer_flags(self, program: str) -> list[str]:
        if program == "stub_engine":  # it is started and killed many times
            return []
        flags = [f"-fsanitize={self.sanitize}"]
        if self.libfuzzer:
            flags.append("-fsanitize=fuzzer-no-link")
        if "undefined" in self.sanitize:
            flags += ["-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"]
        return [*flags, "--coverage"] if self.coverage else flags

    def _object(self, program: str, source: Path) -> Path:
        includes = _CPU_INCLUDES if _CPU[0] in _SOURCES[program] else _TRITON_INCLUDES
        flags = [*_FLAGS, *self._sanitizer_flags(program), *(f"-I{path}" for path in includes)]
        if PLUGINS / "cpu" in source.parents:
            flags += ["-fPIC"]
            if "address" in self.sanitize:
                flags.append("-DFASER_HEAP_MEMORY")
        if source.stem in _ISA_FLAGS and platform.machine() == "x86_64":
            wanted = _ISA_FLAGS[source.stem]
            flags += wanted if _takes(self.compiler, tuple(wanted)) else []
        if source.stem.startswith("kernels_"):  # else a compiler takes minutes
            flags.append("-fno-sanitize=undefined")
            if "clang" not in self.compiler:
                flags += ["--param=asan-instrumentation-with-call-threshold=0", "-Wno-maybe-uninitialized"]
        found = BUILD / f"{source.stem}-{_hash(_headers(), source.read_text(), *flags, self.compiler)}.o"
        if not found.exists():
            self._run([*flags, "-c", str(source)], found)
        return found

    def _run(self, arguments: Sequence[str], output: Path) -> None:
        scratch = output.with_suffix(f".scratch{output.suffix}")
        done = subprocess.run([self.compiler, *arguments, "-o", str(scratch)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        scratch.rename(output)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _headers() -> str:
    """A hash of all that sources include."""
    paths = sorted(
        {
            path
            for folder in (*_CPU_INCLUDES, *_TRITON_INCLUDES)
            for kind in ("*.h", "*.inl")
            for path in folder.rglob(kind)
        }
    )
    return _hash(*(f"{path.name} {path.read_text()}" for path in paths))


@functools.cache
def _takes(compiler: str, flags: tuple[str, ...]) -> bool:
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True).returncode == 0


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
