"""The section "host_profile"."""

from __future__ import annotations

import json
from pathlib import Path

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
