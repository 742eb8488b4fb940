"""The environment of a bench run, so that its numbers can be interpreted later."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faser_trtllm

MAX_FOREIGN_SHARE = 0.03  # above this share, spinning thread pools and barriers suffer disproportionately


def describe_environment(command_line: Sequence[str]) -> dict[str, Any]:
    """Hardware, system and source; workers add the versions of the systems under test."""
    commit, dirty = _git_state(Path(faser_trtllm.__file__).parent)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "cpu_flags": _cpu_flags(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "os": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "git_commit": commit,
        "git_dirty": dirty,
        "command_line": " ".join(portable(part) for part in command_line),
        "versions": {"python": platform.python_version()},
    }


def portable(argument: str) -> str:
    """Return an argument whose paths are relative, or cut to the last component."""
    flag, equals, value = argument.rpartition("=")
    if not os.path.isabs(value):
        return argument
    relative = os.path.relpath(value)
    return flag + equals + (os.path.basename(value) if relative.startswith("..") else relative)


class CpuMeter:
    """A meter of foreign CPU use since its creation; ended workers count as ours."""

    def __init__(self) -> None:
        self._start = self._read()

    def shares(self) -> dict[str, float]:
        """Shares of total core time: other_share used by other processes, steal_share by other virtual machines."""
        total, busy, steal, own = (end - start for start, end in zip(self._start, self._read(), strict=True))
        return {"other_share": max(0.0, busy - own) / max(total, 1e-9), "steal_share": steal / max(total, 1e-9)}

    def _read(self) -> tuple[float, float, float, float]:
        return (*core_seconds(), sum(os.times()[:4]))


def core_seconds() -> tuple[float, float, float]:
    """Seconds of all cores since the machine started: total, busy, and stolen by other virtual machines."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    busy = user + nice + system + irq + softirq
    return busy + idle + iowait + steal, busy, steal


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return sorted(f for f in match[1].split() if f.startswith(("avx", "amx", "sve", "bf16"))) if match else []


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _git_state(directory: Path) -> tuple[str | None, bool]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return commit, bool(commit and git("status", "--porcelain", "--untracked-files=no"))
