"""What this machine can do at most, by a loop in C: the bound of every cell."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("machine.c")


@dataclass(frozen=True)
class Machine:
    """read_gb_per_s: from memory. gflop_per_s: bf16 products into fp32, or fp32 ones where the processor has none."""

    read_gb_per_s: float
    gflop_per_s: float

    def least_ms(self, num_bytes: float, num_flop: float) -> tuple[float, str]:
        """A pass takes at least so long, and the part that says so: "memory" or "arithmetic"."""
        memory_ms = num_bytes / self.read_gb_per_s / 1e6
        arithmetic_ms = num_flop / self.gflop_per_s / 1e6
        return (memory_ms, "memory") if memory_ms > arithmetic_ms else (arithmetic_ms, "arithmetic")


def measure_machine(num_threads: int, cores: tuple[int, ...], work_dir: Path) -> Machine | None:
    """About 10 s; None without a C compiler, or on a processor whose products the loop does not know."""
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
