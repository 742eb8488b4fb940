"""Compile a stem of plugins/cuda for one architecture with nvcc, to a cubin or PTX, cached by content.

`python -m faser_trtllm.ops.cuda.compiler` compiles every stem for every architecture and prints registers, spills and
shared memory against each file's stated limits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from faser_trtllm.errors import ConfigError, FaserError, install

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MIN_NVCC_VERSION = (12, 8)
WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"

_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v,-warn-spills")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_LIMIT = re.compile(
    r"// limits(?: of (?P<kernels>\S+))?: registers <= (?P<registers>\d+), spill_bytes <= (?P<spill_bytes>\d+), "
    r"shared_bytes <= (?P<shared_bytes>\d+)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one kernel, as ptxas reports them."""

    kernel: str
    registers: int  # per thread
    spill_bytes: int  # stores and loads
    shared_bytes: int  # of shared memory


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits for a kernel; `kernels` is a name pattern."""

    kernels: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    def broken_by(self, used: Resources) -> list[str]:
        """Return one phrase per limit exceeded."""
        return [
            f"{field} {getattr(used, field)} > {getattr(self, field)}"
            for field in ("registers", "spill_bytes", "shared_bytes")
            if getattr(used, field) > getattr(self, field)
        ]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled stem."""

    stem: str
    arch: str
    kind: str  # "cubin" or "ptx"
    path: Path
    resources: tuple[Resources, ...]  # empty for PTX, which is not assembled


def source_dir() -> Path:
    """Return the folder of the .cu files: next to the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[2]
    for path in (package.parent / "plugins" / "cuda", package / "plugins" / "cuda"):
        if path.is_dir():
            return path
    raise ConfigError(f"plugins/cuda is missing next to {package.name}; install from a checkout with ./build.sh setup")


def cache_dir() -> Path:
    """Return build/cuda in a checkout, else a folder in the user's cache."""
    root = source_dir().parents[1]
    if (root / "pyproject.toml").is_file():
        return root / "build" / "cuda"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "faser_trtllm" / "cuda"


def stems() -> tuple[str, ...]:
    """Return the names of all kernels' files, sorted."""
    return tuple(sorted(path.stem for path in source_dir().rglob("*.cu")))


def source_of(stem: str, folder: Path | None = None) -> Path:
    """Return the path of a stem's file anywhere below plugins/cuda or `folder`; it may not exist."""
    root = folder or source_dir()
    return next(root.rglob(f"{stem}.cu"), root / f"{stem}.cu")


@functools.cache
def find_nvcc() -> Path:
    """Return the first nvcc >= 12.8 of the pip wheels, $CUDA_HOME and PATH; raise ConfigError if there is none."""
    candidates = [root / "bin" / "nvcc" for root in _wheel_roots()]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "bin" / "nvcc")
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    found = [path for path in candidates if path.is_file()]
    for path in found:
        if _nvcc_version(path) >= MIN_NVCC_VERSION:
            return path
    least = ".".join(map(str, MIN_NVCC_VERSION))
    what = f"nvcc {'.'.join(map(str, _nvcc_version(found[0])))} is too old" if found else "nvcc was not found"
    raise ConfigError(
        f"{what}: compiling CUDA kernels needs nvcc >= {least}; {install('cuda')} ({WHEELS}) or a CUDA toolkit"
    )


def include_dirs() -> tuple[Path, ...]:
    """Return the folders of the CUDA headers (cuda_bf16.h, nv/target), for compiling kernels with a host compiler."""
    nvcc = find_nvcc()
    # Ask nvcc, since the file found may be a wrapper outside the toolkit.
    done = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True)
    match = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.MULTILINE)
    if match is None:
        raise FaserError(f"{nvcc} does not say where its headers are: {done.stderr.strip()}")
    include = Path(match[1].strip()).resolve() / "include"
    return (include, include / "cccl")


def compile_stem(stem: str, arch: str, kind: str = "cubin", defines: Mapping[str, int | str] | None = None) -> Compiled:
    """Compile plugins/cuda/<stem>.cu for one architecture (sm_80 ...), or take it from the cache.

    kind "ptx" gives text for compute_<arch>. defines restrict what a file instantiates (see the top of each file).
    Raises ConfigError for an unknown stem or kind or a missing nvcc, FaserError with the compiler's output if it fails.
    """
    if stem not in stems():
        raise ConfigError(f"stem {stem!r} is unknown; plugins/cuda has {', '.join(stems())}")
    if kind not in ("cubin", "ptx"):
        raise ConfigError(f"kind is {kind!r}; it must be 'cubin' or 'ptx'")
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ConfigError(f"arch is {arch!r}; it must be like sm_90")
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in sorted((defines or {}).items()))]
    nvcc = find_nvcc()
    folder = cache_dir()
    name = f"{stem}-{arch}-{_content_hash(stem, nvcc, flags)}"
    target, report = folder / f"{name}.{kind}", folder / f"{name}.{kind}.json"
    if not (target.is_file() and report.is_file()):
        _compile(nvcc, stem, arch, kind, flags, target, report)
    resources = tuple(Resources(**entry) for entry in json.loads(report.read_text()))
    return Compiled(stem, arch, kind, target, resources)


def compile_all(
    names: Iterable[str], architectures: Iterable[str], jobs: int = 2, defines: Mapping[str, int | str] | None = None
) -> list[Compiled]:
    """Return a cubin per stem and architecture, in the arguments' order; `jobs` are compiled at a time."""
    architectures = tuple(architectures)
    wanted = [(stem, arch) for stem in names for arch in architectures]
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(lambda pair: compile_stem(pair[0], pair[1], defines=defines), wanted))


def check_driver(version: int) -> None:
    """Raise ConfigError unless a driver of this version (cuDriverGetVersion: 12080 for CUDA 12.8) runs nvcc's output.

    A driver runs cubins of all toolkits of its own major version and of older ones.
    """
    nvcc = nvcc_version()
    if version // 1000 < nvcc[0]:
        raise ConfigError(
            f"the NVIDIA driver is for CUDA {version // 1000}.{version % 1000 // 10}, nvcc {nvcc[0]}.{nvcc[1]} makes "
            f"kernels for drivers of CUDA {nvcc[0]}.0 or newer; update the driver"
        )


def parse_resources(log: str) -> list[Resources]:
    """Return the resources of each kernel from the output of `ptxas -v`."""
    found: list[Resources] = []
    kernel, spills = "", 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernel, spills = match[1], 0
        elif match := _SPILLS.search(line):
            spills = int(match[2]) + int(match[3])
        elif (match := _USED.search(line)) and kernel:
            found.append(Resources(kernel, int(match[1]), spills, int(match[2] or 0)))
            kernel = ""
    return found


def limits_of(stem: str) -> list[Limits]:
    """Return the limits stated in a file, in order.

    A line "// limits: registers <= N, spill_bytes <= N, shared_bytes <= N" applies to all its kernels, "// limits of
    PATTERN: ..." to those whose name matches.
    """
    text = source_of(stem).read_text()
    return [
        Limits(match["kernels"] or "*", int(match["registers"]), int(match["spill_bytes"]), int(match["shared_bytes"]))
        for match in _LIMIT.finditer(text)
    ]


def broken_limits(compiled: Compiled) -> list[str]:
    """Return one sentence per kernel of a cubin that uses more than its file allows or has no stated limit."""
    stated = limits_of(compiled.stem)
    broken = []
    for used in compiled.resources:
        limits = next((limits for limits in stated if fnmatch.fnmatch(used.kernel, limits.kernels)), None)
        where = f"{used.kernel} ({compiled.arch})"
        if limits is None:
            broken.append(f"{where} has no limit stated in {compiled.stem}.cu")
        else:
            broken += [f"{where}: {phrase}" for phrase in limits.broken_by(used)]
    return broken


def _wheel_roots() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) / "cu13" for place in (spec.submodule_search_locations or [])] if spec else []


def nvcc_version() -> tuple[int, int]:
    """Return the version of find_nvcc() as (major, minor)."""
    return _nvcc_version(find_nvcc())


@functools.cache
def _nvcc_version(nvcc: Path) -> tuple[int, int]:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return (0, 0)
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _content_hash(stem: str, nvcc: Path, flags: list[str]) -> str:
    digest = hashlib.sha256(repr((_nvcc_version(nvcc), flags)).encode())
    for path in with_headers(source_of(stem)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def with_headers(source: Path) -> list[Path]:
    """Return a file and all files it includes, looked up in its folder and in source_dir(), in a fixed order."""
    found, waiting = [source], [source]
    while waiting:
        path = waiting.pop()
        for name in _INCLUDE.findall(path.read_text()):
            places = (Path(os.path.normpath(folder / name)) for folder in (path.parent, source_dir()))
            header = next((place for place in places if place.is_file()), None)
            if header is not None and header not in found:
                found.append(header)
                waiting.append(header)
    return found


def _compile(nvcc: Path, stem: str, arch: str, kind: str, flags: list[str], target: Path, report: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / "out"
        target_arch = arch if kind == "cubin" else arch.replace("sm_", "compute_")
        command: list[str | Path] = [
            nvcc,
            f"-{kind}",
            f"-arch={target_arch}",
            *flags,
            "-I",
            source_dir(),
            "-o",
            output,
            source_of(stem),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise FaserError(f"nvcc failed on {stem}.cu for {arch}: {log.strip()}")
        written = Path(scratch) / "report"
        written.write_text(json.dumps([asdict(entry) for entry in parse_resources(log)]))
        os.replace(written, report)
        os.replace(output, target)


def _define(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"--define is {text!r}; it must be like FASER_HEAD_DIM=128")
    return name, value


def main(arguments: list[str] | None = None) -> int:
    """Compile and print the report; returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m faser_trtllm.ops.cuda.compiler", description=__doc__)
    parser.add_argument("--arch", action="append", help=f"repeatable; default {' '.join(ARCHITECTURES)}")
    parser.add_argument("--stem", action="append", help="repeatable; default every file of plugins/cuda")
    parser.add_argument("--define", action="append", default=[], help="NAME=VALUE for all of them, repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="nvcc processes at a time")
    parser.add_argument("--report", type=Path, help="also write the report as JSON to this file")
    options = parser.parse_args(arguments)
    try:
        defines = dict(_define(text) for text in options.define)
        done = compile_all(options.stem or stems(), options.arch or ARCHITECTURES, options.jobs, defines)
    except FaserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{'kernel':44s} {'arch':7s} {'registers':>9s} {'spilled B':>9s} {'shared B':>9s}")
    for compiled in done:
        for used in compiled.resources:
            print(
                f"{used.kernel:44s} {compiled.arch:7s} {used.registers:9d} {used.spill_bytes:9d} {used.shared_bytes:9d}"
            )
    if options.report:
        rows = [{"stem": c.stem, "arch": c.arch, **asdict(used)} for c in done for used in c.resources]
        options.report.write_text(json.dumps(rows, indent=1) + "\n")
    broken = [sentence for compiled in done for sentence in broken_limits(compiled)]
    for sentence in broken:
        print(sentence, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
