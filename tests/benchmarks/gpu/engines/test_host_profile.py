"""The section "host_profile"."""

from __future__ import annotations

import cProfile
import json
from pathlib import Path

from benchmarks.gpu.engines import host_profile
from benchmarks.gpu.options import GpuBenchOptions
from tests.benchmarks.gpu.harness import walk


def test_the_section_runs_dry(options: GpuBenchOptions) -> None:
    found = walk("host_profile", options)
    assert [table["title"].split(",")[1].split(":")[0].strip() for table in found["tables"]] == ["off", "fixed"]
    for table in found["tables"]:
        names = " ".join(row[0] for row in table["rows"])
        assert "faser_trtllm/" in names
    text = json.dumps(found["tables"])
    assert str(Path(__file__).parents[4]) not in text
    assert " at 0x" not in text


def busy() -> None:
    for _ in range(3):
        slow()


def slow() -> int:
    return sum(range(20_000))


def test_functions_are_counted_by_the_step() -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(4):
        busy()
    profile.disable()
    rows = {
        name.split()[-1]: (calls, int(own), int(whole))
        for name, calls, own, whole in host_profile.function_rows(profile, 4)
    }
    assert rows["busy"][0] == "1.0"
    assert rows["slow"][0] == "3.0"
    assert rows["busy"][1] < rows["busy"][2] >= rows["slow"][2]
