"""plugins/triton under AddressSanitizer, UBSan and TSan, between a stub of Triton and a stub engine process."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.effort import pick
from tests.support.native_build import NativeBuild

SANITIZERS = ("address,undefined", "thread")
RULES = (
    "a factory is deleted before the final flag",
    "two final flags",
    "a response after the final one",
    "an output without a buffer",
    "more than the buffer",
    "a response sent twice",
    "an error deleted twice",
    "a request that nobody can answer",
    "an input that is not there",
    "something that is left",
)


def _build(sanitize: str) -> NativeBuild:
    build = NativeBuild(sanitize)
    if reason := build.why_not():
        pytest.skip(reason)
    return build


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_the_backend_keeps_tritons_rules(sanitize: str) -> None:
    """Streams, errors, cancellation, crashes, hangs, drains, bad frames, failures of Triton, then random traffic."""
    build = _build(sanitize)
    command = [str(build.program("drive_backend")), str(build.program("stub_engine"))]
    command.append(f"--seconds={pick(3, 120)}")
    if sanitize == "thread":
        command += pick(["--skip=backlog"], [])  # 300 MB, which take ThreadSanitizer ten seconds
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-8000:]
    assert "rounds of random traffic" in done.stdout


@pytest.mark.parametrize("rule", RULES)
def test_the_stub_notices(rule: str) -> None:
    program = _build("address,undefined").program("break_rules")
    done = subprocess.run([str(program), rule], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "breaks a rule of Triton" in done.stderr or "AddressSanitizer" in done.stderr
