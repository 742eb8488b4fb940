"""Tests of the message of `faser openai` when its packages are missing."""

import subprocess
import sys

import pytest

from tests.support.effort import pick
from tests.support.triton_server import ROOT

PACKAGES = (*pick((), ("jinja2", "starlette", "uvicorn")), "tritonclient")

_WITHOUT = """
import sys
sys.modules[{package!r}] = None
sys.argv = ["faser", "openai", "--engine_dir", "engines/nowhere"]
from faser_trtllm.cli import main
main()
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_one_sentence_with_the_command_that_installs_it(package):
    script = _WITHOUT.format(package=package)
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1, run.stderr
    assert f"the package {package}" in run.stderr
    assert "pip install -c constraints.txt -e '.[serve,openai]'" in run.stderr
