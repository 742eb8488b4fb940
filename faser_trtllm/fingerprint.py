"""The machine and the engines that a cost table is valid for, and the table's path."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path

from faser_trtllm import native
from faser_trtllm.backends import find_backend
from faser_trtllm.core.cost_table import CostTable, Fingerprint
from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda import driver

PROFILE = "profile.json"
"""Name of the cost table in an engine directory."""


def fingerprint_of(engine_dir: Path, num_threads: int) -> Fingerprint:
    """Return the fingerprint of an engine directory that EngineDir.load accepted on this machine.

    For GPU engines it names the first GPU, its architecture, driver and SMs; ConfigError without a GPU.
    """
    manifest = (engine_dir / "manifest.json").read_bytes()
    if find_backend(json.loads(manifest)["backend"]).on_cpu:
        return Fingerprint(cpu_model(), native.isa(), num_threads, hashlib.sha256(manifest).hexdigest())
    return gpu_fingerprint(manifest)


def gpu_fingerprint(made_of: bytes) -> Fingerprint:
    """Return the fingerprint of engines on the first GPU. made_of: their manifest, or bytes that identify them."""
    return Fingerprint(*gpu_model(), hashlib.sha256(made_of).hexdigest())


def gpu_model() -> tuple[str, str, int]:
    """Return name, architecture with the driver's CUDA version, and SMs of the first GPU; ConfigError without one."""
    version = driver.driver_version()
    architecture = f"{driver.device_arch()}, driver {version // 1000}.{version % 1000 // 10}"
    return driver.device_name(), architecture, driver.num_sms()


def cpu_model() -> str:
    """Return the processor's name from the kernel, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def extra_table_path(engine_dir: Path, fingerprint: Fingerprint) -> Path:
    """Return the path of this machine's table if profile.json belongs to a different machine that shares the folder."""
    digest = hashlib.sha256(json.dumps(asdict(fingerprint)).encode()).hexdigest()
    return engine_dir / f"profile-{digest[:12]}.json"


def load_costs(engine_dir: Path, num_threads: int) -> CostTable | None:
    """Return the directory's table for this machine; None without profile.json, ConfigError if no table fits."""
    found = find_costs(engine_dir, num_threads)
    return None if found is None else found[1]


def find_costs(engine_dir: Path, num_threads: int) -> tuple[Path, CostTable] | None:
    """Return the table of load_costs() with the path of its file."""
    path = engine_dir / PROFILE
    if not path.exists():
        return None
    fingerprint = fingerprint_of(engine_dir, num_threads)
    try:
        return path, CostTable.load(path, fingerprint)
    except ConfigError as error:
        extra = extra_table_path(engine_dir, fingerprint)
        try:
            return extra, CostTable.load(extra, fingerprint)
        except ConfigError:
            raise error from None
