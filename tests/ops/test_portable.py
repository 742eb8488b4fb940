"""The sampling ops again on the portable instruction set: the same numbers, hence the same tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm import native

FOLDER = Path(__file__).parent
TESTS = [
    "test_accept.py::test_native_is_the_reference",
    "test_accept.py::test_seeded_and_greedy_text_do_not_depend_on_speculation",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("FASER_CPU_ISA" in os.environ, reason="the run below sets it")
def test_portable_draws_the_same_tokens():
    if native.isa() == "portable":
        pytest.skip("this machine runs the portable code anyway")
    root = FOLDER.parent.parent
    environment = os.environ | {"FASER_CPU_ISA": "portable", "PYTHONPATH": str(root)}
    arguments = ["-q", "-p", "no:cacheprovider", *(str(FOLDER / test) for test in TESTS)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=860,
    )
    assert result.returncode == 0, result.stdout[-4000:]
