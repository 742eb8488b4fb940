"""Section "environment": versions, the device, and the two ceilings of the rooflines."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

from benchmarks.gpu.bench import Bench
from faser_trtllm.builder.plan_file import arch_capability
from faser_trtllm.ops.cuda.driver import call_driver, device_arch, device_name, driver_version, load_driver

PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "transformers", "vllm", "tensorrt", "tensorrt_rtx_cu13")
COPY_BYTES, DRY_COPY_BYTES = 4 << 30, 1 << 20
GEMM_SIZE, DRY_GEMM_SIZE = 8192, 64


def run(bench: Bench) -> None:
    record = bench.record
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    record.value("versions", versions)
    device = _device(bench)
    record.value("device", device.pop("name"))
    record.value("device_properties", device)
    shown = [*versions.items(), *device.items()]
    record.table("Versions and device", ("what", "value"), [(name, value or "not there") for name, value in shown])
    found = record.attempt("ceilings", lambda: _ceilings(bench))
    if found is None:
        return
    read, copy, gemm = found
    record.value("ceilings", {"bytes_per_s": max(read, copy), "flops_per_s": gemm})
    record.table(
        "Ceilings",
        ("what", "measured"),
        [
            ("device memory, read by a sum, TB/s", f"{read / 1e12:.2f}"),
            ("device memory, copy, read and written bytes, TB/s", f"{copy / 1e12:.2f}"),
            ("bf16 matrix product of random data, TFLOP/s", f"{gemm / 1e12:.0f}"),
        ],
        "Rooflines below take the faster of the two bandwidths.",
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(bench: Bench) -> dict[str, Any]:
    import torch

    if not bench.machine.is_gpu:
        return {"name": "no GPU (dry run)", "sms": bench.machine.num_sms}
    driver = load_driver()
    num_bytes = call_driver(driver, driver.cuDeviceTotalMem, call_driver(driver, driver.cuDeviceGet, 0))
    return {
        "name": device_name(),
        "sms": bench.machine.num_sms,
        "compute capability": arch_capability(device_arch()),
        "driver's CUDA": driver_version(),
        "memory GiB": round(int(num_bytes) / 2**30, 1),
        "L2 MiB": round(bench.machine.l2_bytes / 2**20),
        "cuda of torch": torch.version.cuda,
        "driver, clocks": _nvidia_smi(),
        "nvcc": shutil.which("nvcc") is not None,
    }


def _nvidia_smi() -> str:
    """Query nvidia-smi, without changing any setting."""
    fields = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout.strip() or done.stderr.strip()


def _ceilings(bench: Bench) -> tuple[float, float, float]:
    """Measure bytes per second of a read and of a copy, and operations per second of a matrix product."""
    return (*_bandwidths(bench), _matrix_rate(bench))


def _bandwidths(bench: Bench) -> tuple[float, float]:
    import torch

    machine = bench.machine
    num_values = (DRY_COPY_BYTES if bench.is_dry else COPY_BYTES) // 4
    source = torch.randn(num_values, generator=machine.generator(bench.options.seed), device=machine.device)
    target, total = torch.empty_like(source), torch.empty((), device=machine.device)
    read_ms = machine.time_ms([lambda: torch.sum(source, dim=0, out=total)], 3)
    copy_ms = machine.time_ms([lambda: target.copy_(source)], 3)
    return 4e3 * num_values / read_ms, 8e3 * num_values / copy_ms


def _matrix_rate(bench: Bench) -> float:
    import torch

    machine = bench.machine
    n = DRY_GEMM_SIZE if bench.is_dry else GEMM_SIZE
    generator = machine.generator(bench.options.seed)
    left, right = (torch.randn(n, n, generator=generator, device=machine.device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2e3 * n**3 / machine.time_ms([lambda: torch.mm(left, right, out=out)], 3)
