"""The images of deploy/ are pinned by digest; scripts/pin_image.sh writes and checks that."""

import os
import re
import shutil
import subprocess

import pytest

from tests.support.triton_server import ROOT

FILES = ("deploy/Dockerfile", "deploy/compose.yaml", "deploy/kubernetes/deployment.yaml")
DIGEST = "sha256:" + "ab" * 32
DOCKER = """#!/bin/sh
[ "$1 $2 $3" = "buildx imagetools inspect" ] || exit 9
echo "$4" >>asked
cat answer
"""


@pytest.fixture
def checkout(tmp_path):
    """The script and the files it writes, with a docker whose answer is the file `answer`."""
    for name in ("scripts/pin_image.sh", *FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    (tmp_path / "answer").write_text(f"{DIGEST}\n")
    return tmp_path


def run(checkout, *arguments):
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(checkout / "scripts" / "pin_image.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment, timeout=60)


def images(folder):
    """All images but ours, with the files that name them."""
    pattern = re.compile(r"(?:image: |TRITON_IMAGE=)(?!faser-trtllm)(\S+)")
    return {(name, image) for name in FILES for image in pattern.findall((folder / name).read_text())}


def test_every_image_has_a_tag_and_a_digest():
    found = images(ROOT)
    assert {name for name, _ in found} == set(FILES)
    assert [image for _, image in found if not re.fullmatch(r"\S+:[\w.-]+@sha256:[0-9a-f]{64}", image)] == []


def test_digests_are_written_where_they_are_old_and_where_there_are_none(checkout):
    path = checkout / "deploy" / "compose.yaml"
    path.write_text(re.sub(r"(grafana:[\w.]+)@sha256:\w+", r"\1", path.read_text()))
    before = images(checkout)
    assert run(checkout, "--check").returncode == 1
    assert images(checkout) == before
    assert run(checkout).returncode == 0
    assert images(checkout) == {(name, f"{image.partition('@')[0]}@{DIGEST}") for name, image in before}
    assert run(checkout, "--check").returncode == 0
    asked = set((checkout / "asked").read_text().split())
    assert asked == {image.partition("@")[0] for _, image in before}


def test_an_answer_that_is_no_digest_is_refused(checkout):
    (checkout / "answer").write_text("unauthorized\n")
    before = images(checkout)
    refused = run(checkout)
    assert refused.returncode == 1
    assert "has no digest for" in refused.stderr
    assert images(checkout) == before
