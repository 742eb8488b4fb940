"""What a cost table is valid for: this processor, its instruction set, the threads and the engines."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from faser_trtllm import native
from faser_trtllm.core.cost_table import Fingerprint

PROFILE = "profile.json"
"""Name of the cost table in an engine directory."""


def fingerprint_of(engine_dir: Path, num_threads: int) -> Fingerprint:
    """The fingerprint of a whole engine directory (EngineDir.load accepted it) on this machine."""
    manifest = hashlib.sha256((engine_dir / "manifest.json").read_bytes()).hexdigest()
    return Fingerprint(cpu_model(), native.isa(), num_threads, manifest)


def cpu_model() -> str:
    """The processor's name as the kernel tells it, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
