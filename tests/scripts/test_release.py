"""A release: one version everywhere, and workflows that use the wheel that they built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from faser_trtllm import __version__
from tests.support.triton_server import ROOT

SMOKE_TEST = "scripts/smoke_test_wheel.py"


def jobs_of(workflow: str) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    return jobs


def commands_of(job: dict[str, Any]) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("plugins/triton/wire.h", r'kRelease = "(.+?)"'),
        ("deploy/Dockerfile", r"faser-trtllm:(\S+)"),
        ("deploy/compose.yaml", r"faser-trtllm:(\S+)"),
        ("deploy/kustomization.yaml", r"newTag: (\S+)"),
        ("docs/install.md", r"faser-trtllm:(\S+)"),
    ],
)
def test_every_version_is_that_of_the_package(path: str, pattern: str) -> None:
    assert set(re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)) == {__version__}


def test_the_newest_heading_of_the_changelog_is_the_version_with_a_date() -> None:
    """Next to it only what is not released yet, so that a release's notes are never empty."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = next(heading for heading in headings if heading != "[Unreleased]")
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", newest)


def test_every_wheel_is_used_before_it_is_kept() -> None:
    jobs = jobs_of("ci")
    assert {entry["arch"] for entry in jobs["wheels"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    for name in ("wheels", "sdist"):
        assert f"python {SMOKE_TEST}" in commands_of(jobs[name]), name
        assert "uses" in jobs[name]["steps"][-1], "what is uploaded was used before"


def test_a_release_has_what_ci_built_with_checksums_and_provenance() -> None:
    jobs = jobs_of("release")
    assert (jobs["ci"]["uses"], jobs["release"]["needs"]) == ("./.github/workflows/ci.yml", "ci")
    steps = jobs["release"]["steps"]
    order = ["download-artifact", "CHANGELOG.md", "cyclonedx-py", "SHA256SUMS", "attest-build-provenance", "gh release"]
    found = [next(i for i, step in enumerate(steps) if word in str(step)) for word in order]
    assert found == sorted(found)


def smoke_test(wheel: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / SMOKE_TEST), str(wheel)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_smoke_test_ends_at_the_first_step_that_fails(tmp_path: Path) -> None:
    wheel = tmp_path / f"faser_trtllm-{__version__}-py3-none-any.whl"
    wheel.write_bytes(b"no archive")
    done = smoke_test(wheel)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended with status 1, expected 0" in done.stderr


def test_the_smoke_test_takes_a_wheel(tmp_path: Path) -> None:
    done = smoke_test(tmp_path / "missing.whl")
    assert done.returncode == 2
    assert "which is not a .whl file; build one with" in done.stderr
