"""The machine's limits, measured by a loop in C, which bound every cell."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("machine.c")


@dataclass(frozen=True)
class Machine:
    """A machine's limits: reads from memory, and bf16 products into fp32 (fp32 products without bf16)."""

    read_gb_per_s: float
    gflop_per_s: float

    def least_ms(self, num_bytes: float, num_flop: float) -> tuple[float, str]:
        """Return the least time of a pass, and its limit: "memory" or "arithmetic"."""
        memory_ms = num_bytes / self.read_gb_per_s / 1e6
        arithmetic_ms = num_flop / self.gflop_per_s / 1e6
        return (memory_ms, "memory") if memory_ms > arithmetic_ms else (arithmetic_ms, "arithmetic")


def measure_machine(num_threads: int, cores: tuple[int, ...], work_dir: Path) -> Machine | None:
    """Measure in about 10 s; None without a C compiler, or on a processor that the loop does not support."""
    program = work_dir / "machine"
    try:
        subprocess.run(
            ["cc", "-O2", "-march=native", "-pthread", str(SOURCE), "-o", str(program)], check=True, capture_output=True
        )
        command = ["taskset", "-c", ",".join(map(str, cores)), str(program), str(num_threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = json.loads(done.stdout)
    return Machine(**found) if found["gflop_per_s"] > 0 else None
