"""The kernels of plugins/cuda as nvcc's PTX, interpreted on the CPU and launched like a cubin."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.compiler import cache_dir, compile_stem, find_nvcc, source_dir, source_of
from faser_trtllm.ops.cuda.driver import Argument, Dim3
from tests.ops.cuda.ptx.interpreter.machine import Machine
from tests.ops.cuda.ptx.interpreter.memory import Memory
from tests.ops.cuda.ptx.interpreter.program import Program


class InterpretedModule:
    """Launcher over host memory; a launch ends before it returns. options: of Machine."""

    def __init__(self, program: Program, memory: Memory, **options) -> None:
        self._machine = Machine(program, memory, **options)

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """Launch a kernel as Launcher.launch does. A pointer's value is None when it is null."""
        self._machine.launch(kernel, grid, block, [argument.value or 0 for argument in arguments])


class HostMemory(Memory):
    """Global memory is every tensor whose address was taken since this was made, to the byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        address_of = torch.Tensor.data_ptr

        def noted(tensor: torch.Tensor) -> int:
            address = address_of(tensor)
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            self.add_host(address, (last + 1) * tensor.element_size() if tensor.numel() else 0, tensor)
            return address

        monkeypatch.setattr(torch.Tensor, "data_ptr", noted)


@functools.lru_cache(maxsize=2)  # a program's instructions are many objects
def program_of(stem: str, arch: str = "sm_90", fused: bool = True, **defines: int) -> Program:
    """A stem as nvcc compiles it, or a skipped test where there is no nvcc. fused: with multiplications and additions
    in one rounding, which a host compiler does not have."""
    return Program(ptx_of(stem, arch, fused, defines))


def ptx_of(stem: str, arch: str, fused: bool, defines: Mapping[str, int]) -> str:
    """Return the text of the program that program_of returns."""
    try:
        nvcc = find_nvcc()
    except ConfigError as error:
        pytest.skip(str(error))
    if fused:
        return compile_stem(stem, arch, "ptx", defines).path.read_text()
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-fmad=false"]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    return _unfused_ptx(stem, [str(nvcc), "-ptx", f"-arch={arch.replace('sm', 'compute')}", *flags])


def _unfused_ptx(stem: str, command: Sequence[str]) -> str:
    """Kept as long as the compiler, the command and all that a stem may include are the same."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr((command, version)).encode())
    source = source_of(stem)
    for path in (source, *sorted(source_dir().rglob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = cache_dir() / "unfused" / f"{stem}-{digest.hexdigest()[:16]}.ptx"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            whole = [*command, "-I", str(source_dir()), "-o", str(made), str(source)]
            done = subprocess.run(whole, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(made, target)  # at once, as another of pytest's workers may look for it
    return target.read_text()
