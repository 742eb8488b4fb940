"""The command line is recorded without the machine's own folders."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.environment import CpuMeter, describe_environment, portable


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--rounds", "--rounds"),
        ("engines/demo/target", "engines/demo/target"),
        ("/opt/elsewhere/bin/python", "python"),
        ("--llama_python=/opt/elsewhere/bin/python", "--llama_python=python"),
    ],
)
def test_portable(argument: str, shown: str) -> None:
    assert portable(argument) == shown


def test_folders_inside_the_working_directory_become_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable(f"--output_dir={tmp_path}/out/x") == "--output_dir=out/x"


def test_description_is_complete() -> None:
    environment = describe_environment(("faser", "bench"))
    assert environment["command_line"] == "faser bench"
    assert environment["num_cores"] >= 1
    assert environment["memory_gib"] > 0
    assert environment["cpu"]


def test_meter_counts_ended_children_as_ours() -> None:
    meter = CpuMeter()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    shares = meter.shares()
    assert 0.0 <= shares["other_share"] <= 1.0
    assert 0.0 <= shares["steal_share"] <= 1.0
    own = meter._read()[3] - meter._start[3]
    assert own >= 0.15
