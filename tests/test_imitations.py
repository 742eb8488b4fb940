"""Tests that imitate devices are left out only where nothing that they cover changed and nobody asked for them."""

from __future__ import annotations

import pytest

from tests.support.imitations import COVERED, ROOT, left_out

ALL = set(COVERED)
KERNELS = {
    *("tests/virtual_gpu", "tests/ops/cuda", "tests/builder/plugins"),
    *("tests/engine/cuda", "tests/engine/gpu", "tests/engine/tensorrt"),
}
PACKAGE = {"tests/fuzz", "tests/serving/traces"}
SERVICE = {tests for tests in COVERED if tests.startswith("tests/serving/")}


@pytest.mark.parametrize(
    ("changed", "asked_for", "runs"),
    [
        (None, ["tests"], ALL),
        ([], ["tests"], set()),
        (["docs/gpu.md", "examples/demo.py"], ["tests"], set()),
        (["faser_trtllm/drafters/suffix.py"], ["tests"], PACKAGE),
        (["faser_trtllm/serving/client.py"], ["tests"], PACKAGE | SERVICE),
        (["faser_trtllm/native/signatures.py"], ["tests"], PACKAGE | {"tests/native"}),
        (["plugins/cuda/accept.cu"], ["tests"], KERNELS),
        (["lab/planner/plan.py"], ["tests"], {"tests/lab", "tests/benchmarks"}),
        (["tests/trtllm/rules.py"], ["tests"], {"tests/trtllm"}),
        (["tests/support/toy_engine.py"], ["tests"], ALL),
        ([], ["tests/ops/cuda/test_accept.py"], {"tests/ops/cuda"}),
        ([], ["tests/virtual_gpu", "tests/core"], {"tests/virtual_gpu"}),
        ([], ["tests/engine"], {"tests/engine/cuda", "tests/engine/gpu", "tests/engine/tensorrt"}),
        ([], ["tests/builder/test_rtx_gpus.py"], {"tests/builder/test_rtx_gpus.py"}),
    ],
)
def test_what_is_left_out(changed, asked_for, runs) -> None:
    assert ALL - left_out(changed, asked_for) == runs


def test_all_of_it_is_there() -> None:
    for tests, sources in COVERED.items():
        assert all((ROOT / name).exists() for name in (tests, *sources)), tests
