"""What measured times are valid for: this machine and these engines."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from faser_trtllm import native
from faser_trtllm.builder.engine_dir import MANIFEST_FILE, EngineDir, sha256_of
from faser_trtllm.core.cost_table import Fingerprint


def fingerprint_of(engines: EngineDir, num_threads: int) -> Fingerprint:
    """num_threads: of the partition that holds every core (CoreSet.num_threads)."""
    return Fingerprint(
        cpu_model=cpu_model(),
        isa=native.isa(),
        num_threads=num_threads,
        engine=sha256_of(engines.path / MANIFEST_FILE)[:16],
    )


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
