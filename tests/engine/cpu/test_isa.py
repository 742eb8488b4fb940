"""The tests of this folder again, on every instruction set this machine can be lowered to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm import native
from tests.support.effort import ONLY_ALL, pick

FOLDER = Path(__file__).parent


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = FOLDER.parents[2]
    environment = os.environ | {"FASER_CPU_ISA": name, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=root, capture_output=True, text=True, timeout=860
    )


@ONLY_ALL
@pytest.mark.skipif("FASER_CPU_ISA" in os.environ, reason="this is one of the runs below")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", pick(["portable"], ["avx512bf16", "avx2", "portable"]))
def test_lower_instruction_sets(name: str) -> None:
    found = _run(name, "-c", "from faser_trtllm.native import isa; print(isa())").stdout.strip()
    if found != name or name == native.isa():
        pytest.skip(f"FASER_CPU_ISA={name} runs {found} here")
    tests = [
        str(FOLDER / file)
        for file in ("test_reference.py", "test_invariance.py", "test_mechanisms.py", "test_experts.py")
    ]
    result = _run(name, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert result.returncode == 0, result.stdout[-4000:]
