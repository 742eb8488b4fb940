"""The demo as a user runs it."""

import os
import subprocess
import sys
import threading

import pytest

from tests.serving.triton import ROOT, shm_names, shm_prefix


@pytest.mark.triton
@pytest.mark.slow
def test_the_demo_streams_compares_and_cleans_up():
    command = [sys.executable, "-m", "faser_trtllm.serving.demo", "--max_tokens", "16"]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
    ) as demo:
        killer = threading.Timer(120, demo.kill)
        killer.start()
        lines = iter(demo.stdout.readline, "")
        said = ""
        for line in lines:
            said += line
            if line.startswith("Triton is ready"):
                break
        else:
            pytest.fail(said)
        prefix = shm_prefix(demo.pid)
        assert shm_names(prefix)
        said += "".join(lines)
    killer.cancel()
    assert demo.returncode == 0, said
    assert said.count("[16 tokens in") == 2
    assert "the tokens are the same with and without speculation" in said
    assert "no process, port or shared memory left behind" in said
    assert not shm_names(prefix)
