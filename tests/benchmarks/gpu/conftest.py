"""The pair that sections run on, enlarged in no time."""

from __future__ import annotations

import pytest

from benchmarks.gpu.options import GpuBenchOptions
from tests.support.checkpoints import make_pair


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> GpuBenchOptions:
    root = tmp_path_factory.mktemp("gpu_sections")
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 300}
    target, draft = make_pair(root / "pair", **sizes)  # type: ignore[arg-type]
    (root / "out").mkdir()
    return GpuBenchOptions(target, draft, root / "out", forms=("1B",), fixed=(2,), max_tokens=6, dry_run=True)
