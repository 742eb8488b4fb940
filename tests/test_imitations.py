"""Tests that imitate devices are left out only where nothing that they cover changed and nobody asked for them."""

from __future__ import annotations

import pytest

from tests.support.imitations import COVERED, ROOT, left_out

ALL = set(COVERED)
KERNELS = {
    *("tests/virtual_gpu", "tests/ops/cuda", "tests/builder/plugins"),
    *("tests/engine/cuda", "tests/engine/gpu", "tests/engine/tensorrt"),
}


@pytest.mark.parametrize(
    ("changed", "asked_for", "runs"),
    [
        (None, ["tests"], ALL),
        ([], ["tests"], set()),
        (["docs/gpu.md", "faser_trtllm/serving/client.py"], ["tests"], set()),
        (["plugins/cuda/accept.cu"], ["tests"], KERNELS),
        (["lab/planner/plan.py"], ["tests"], {"tests/lab", "tests/benchmarks"}),
        (["tests/trtllm/rules.py"], ["tests"], {"tests/trtllm"}),
        (["tests/support/toy_engine.py"], ["tests"], ALL),
        ([], ["tests/ops/cuda/test_accept.py"], {"tests/ops/cuda"}),
        ([], ["tests/virtual_gpu", "tests/core"], {"tests/virtual_gpu"}),
    ],
)
def test_what_is_left_out(changed, asked_for, runs) -> None:
    assert ALL - left_out(changed, asked_for) == runs


def test_every_folder_is_there() -> None:
    for folder, sources in COVERED.items():
        assert all((ROOT / name).is_dir() for name in (folder, *sources)), folder
