"""The demo as a user runs it."""

import subprocess
import sys

import pytest

from tests.serving.triton import ROOT, shm_names


@pytest.mark.triton
@pytest.mark.slow
def test_the_demo_streams_compares_and_cleans_up():
    names = shm_names()
    done = subprocess.run(
        [sys.executable, "-m", "faser_trtllm.serving.demo", "--max_tokens", "16"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[16 tokens in") == 2
    assert "the tokens are the same with and without speculation" in done.stdout
    assert "no process, port or shared memory left behind" in done.stdout
    assert shm_names() <= names
