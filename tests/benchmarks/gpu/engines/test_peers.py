"""The section "peers"."""

from __future__ import annotations

import pytest

from benchmarks.gpu.options import GpuBenchOptions
from tests.benchmarks.gpu.harness import walk
from tests.support.effort import ONLY_ALL


@ONLY_ALL
def test_peers_run_the_same_weights(options: GpuBenchOptions) -> None:
    """transformers, with the enlarged weights, says what the engine says."""
    pytest.importorskip("transformers")
    found = walk("peers", options)
    rows = found["tables"][0]["rows"]
    assert [row[1] for row in rows] == ["off / generate", "fixed:4 / assisted:4", "fixed:8 / assisted:8"]
    assert rows[0][-1].startswith("100.0% / ")
    assert float(rows[0][-1].split()[-1].rstrip("%")) > 50
