"""The machine and the engines that a cost table is valid for, and where the table lies."""

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
    """The fingerprint of a whole engine directory (EngineDir.load accepted it) on this machine.

    Of GPU engines it names the first GPU, its architecture and driver, and its SMs; ConfigError where there is none.
    """
    manifest = (engine_dir / "manifest.json").read_bytes()
    if find_backend(json.loads(manifest)["backend"]).on_cpu:
        return Fingerprint(cpu_model(), native.isa(), num_threads, hashlib.sha256(manifest).hexdigest())
    return gpu_fingerprint(manifest)


def gpu_fingerprint(made_of: bytes) -> Fingerprint:
    """The fingerprint of engines on the first GPU. made_of: their manifest, or what they are made of without one."""
    return Fingerprint(*gpu_model(), hashlib.sha256(made_of).hexdigest())


def gpu_model() -> tuple[str, str, int]:
    """The first GPU: its name, its architecture with the driver's CUDA version, its SMs. ConfigError without one."""
    version = driver.driver_version()
    architecture = f"{driver.device_arch()}, driver {version // 1000}.{version % 1000 // 10}"
    return driver.device_name(), architecture, driver.num_sms()


def cpu_model() -> str:
    """The processor's name from the kernel, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def extra_table_path(engine_dir: Path, fingerprint: Fingerprint) -> Path:
    """Where a table for this fingerprint goes if profile.json is another machine's, which machines that share the
    directory go on using."""
    digest = hashlib.sha256(json.dumps(asdict(fingerprint)).encode()).hexdigest()
    return engine_dir / f"profile-{digest[:12]}.json"


def load_costs(engine_dir: Path, num_threads: int) -> CostTable | None:
    """The directory's table for this machine; None if it has no profile.json, ConfigError if no table fits."""
    found = find_costs(engine_dir, num_threads)
    return None if found is None else found[1]


def find_costs(engine_dir: Path, num_threads: int) -> tuple[Path, CostTable] | None:
    """load_costs(), with the table's file."""
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
