"""The script that fills a folder for a bare GPU machine, in a small checkout; pip's and nvcc's parts are stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.triton_server import ROOT

SCRIPT = "scripts/prepare_gpu_machine.sh"
# Notes its arguments, and leaves the files that the real ones would.
PYTHON = """#!/bin/bash
echo "$*" >>"$NOTED"
case "$*" in
  "-m pip download "*)
    while [ "$1" != --dest ]; do shift; done
    cp "$WHEEL" "$2/" ;;
  "-m faser_trtllm.ops.cuda.compiler "*)
    mkdir -p build/cuda
    for kind in cubin cubin.json; do touch "build/cuda/accept-sm_90-0.$kind" "build/cuda/accept-sm_80-0.$kind"; done ;;
  "-c "*) echo "$SITE/pytriton" ;;
esac
"""
# The machine's: an installation of this package would go before PYTHONPATH.
PYTHON3 = """#!/bin/bash
case "$*" in
  "-m faser_trtllm.cli "*) echo "$PWD: $*" ;;
  *) exec "$REAL" "$@" ;;
esac
"""
CHANGED = "print('changed')"


def make_wheel(folder: Path) -> Path:
    """With one module, which run.sh installs."""
    path, info = folder / "stand_in-1.0-py3-none-any.whl", "stand_in-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("stand_in.py", "NAME = 'installed'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Checkout:
    """A repository of a few files, and an environment in which the script runs in it."""

    def __init__(self, root: Path) -> None:
        self.path, self.noted, self.folder = root / "repo", root / "noted", root / "folder"
        files = {
            "faser_trtllm/__init__.py": "",
            "faser_trtllm/cli.py": "print('committed')",
            "plugins/cuda/accept.cu": "",
            "plugins/cuda/verify_attention.cu": "",
            "docs/figures/large.svg": "<svg/>",
            "docs/gpu.md": "",
            ".gitignore": "*.so\n/build/\n",
        }
        for name, text in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(text)
        (self.path / "scripts").mkdir()
        for name in (SCRIPT, "constraints.txt"):
            shutil.copy(ROOT / name, self.path / name)
        for command in (("init", "-q"), ("add", ".")):
            subprocess.run(["git", *command], cwd=self.path, check=True)
        (self.path / "faser_trtllm" / "cli.py").write_text(CHANGED)  # not committed, and travels all the same
        self.native = self.path / "faser_trtllm" / "_native" / "libfaser_cpu.so"
        self.native.parent.mkdir()
        self.native.write_text("built here")
        site = root / "site"
        for name, text in (("venv/bin/python", PYTHON), ("machine/python3", PYTHON3)):
            program = root / name
            program.parent.mkdir(parents=True)
            program.write_text(text)
            program.chmod(0o755)
        self.programs = root / "machine"
        for name in ("pytriton/tritonserver/bin/tritonserver", "pytriton/tritonserver/caches/local/lib.so"):
            (site / name).parent.mkdir(parents=True)
            (site / name).write_text("")
        (site / "nvidia_pytriton.libs").mkdir()
        for name in ("libssl.so", "libpython3.12.so"):
            (site / "nvidia_pytriton.libs" / name).write_text("")
        self.env = os.environ | {
            "FASER_VENV": str(root / "venv"),
            "NOTED": str(self.noted),
            "WHEEL": str(make_wheel(root)),
            "SITE": str(site),
        }

    def prepare(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.path / SCRIPT), *(arguments or (str(self.folder),))]
        return subprocess.run(command, env=self.env, capture_output=True, text=True)

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """With the folder's run.sh and the machine's Python."""
        env = os.environ | {"PATH": f"{self.programs}:{os.environ['PATH']}", "REAL": sys.executable}
        return subprocess.run(
            [str(self.folder / "run.sh"), *command], env=env, cwd=cwd, capture_output=True, text=True, check=True
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_folder_has_what_the_machine_lacks(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.prepare()
    assert done.returncode == 0, done.stderr
    copy = checkout.folder / "checkout"
    assert (copy / "faser_trtllm" / "_native" / "libfaser_cpu.so").read_text() == "built here"
    assert (copy / "faser_trtllm" / "cli.py").read_text() == CHANGED
    assert (copy / "docs" / "gpu.md").is_file()
    assert not (copy / "docs" / "figures").exists()
    assert sorted(path.name for path in (copy / "build" / "cuda").iterdir()) == [
        "accept-sm_90-0.cubin",
        "accept-sm_90-0.cubin.json",
    ]
    assert not (checkout.folder / "triton.tar.xz").exists()
    found = checkout.run("python3", "-c", "import os, stand_in; print(stand_in.NAME, os.getcwd())", cwd=tmp_path)
    assert found.stdout.split() == ["installed", str(copy)]


def test_wheels_are_those_of_constraints_txt(checkout: Checkout) -> None:
    """And pip is told of no registry."""
    checkout.prepare(str(checkout.folder), "--python", "3.11", "--triton")
    asked = next(line for line in checkout.noted.read_text().splitlines() if line.startswith("-m pip download"))
    pinned = set((ROOT / "constraints.txt").read_text().split())
    wheels = [word for word in asked.split() if "==" in word]
    assert {wheel.partition("==")[0] for wheel in wheels} >= {"pydantic", "gguf", "tritonclient", "grpcio"}
    assert set(wheels) <= pinned
    assert "--python-version 3.11 " in asked
    assert "://" not in (ROOT / SCRIPT).read_text()
    assert not re.search(r"index|find-links|trusted", asked)


def test_every_kernel_is_compiled_and_attention_for_each_head(checkout: Checkout) -> None:
    checkout.prepare(str(checkout.folder), "--arch", "sm_90")
    compiled = [line.split(maxsplit=2)[2] for line in checkout.noted.read_text().splitlines() if "compiler" in line]
    attention = "--arch sm_90 --stem verify_attention --define FASER_HEAD_DIM="
    assert compiled == ["--arch sm_90 --stem accept", f"{attention}64", f"{attention}128"]


def test_a_checkout_that_gets_there_by_itself_is_left_out(checkout: Checkout) -> None:
    checkout.prepare(str(checkout.folder), "--without_checkout")
    assert sorted(path.name for path in checkout.folder.iterdir()) == ["run.sh", "whl"]
    found = checkout.run("faser", "bench", "gpu", cwd=checkout.path)
    assert found.stdout == f"{checkout.path}: -m faser_trtllm.cli bench gpu\n"


def test_triton_comes_without_a_python(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.prepare(str(checkout.folder), "--triton")
    assert done.returncode == 0, done.stderr
    site = checkout.folder / "site"
    checkout.run("true", cwd=tmp_path)
    assert (site / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file()
    assert [path.name for path in (site / "nvidia_pytriton.libs").iterdir()] == ["libssl.so"]
    assert (site / "stand_in.py").is_file()


def test_what_is_too_large_to_travel_is_refused(checkout: Checkout) -> None:
    with checkout.native.open("wb") as file:
        file.truncate(65 << 20)
    done = checkout.prepare()
    assert done.returncode == 1
    assert re.search(r"has 6\d MiB, more than 64; leave out --triton, or the checkout", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name the folder to fill"),
        (("{folder}", "--fast"), "--fast is unknown; there are --arch"),
        (("{folder}", "other"), "one folder is filled"),
        (("{repo}",), "is not empty; remove it or name another"),
    ],
)
def test_what_is_refused(checkout: Checkout, arguments: tuple[str, ...], says: str) -> None:
    names = {"folder": checkout.folder, "repo": checkout.path}
    command = [str(checkout.path / SCRIPT), *(text.format(**names) for text in arguments)]
    done = subprocess.run(command, env=checkout.env, capture_output=True, text=True)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_has_to_run_first_is_named(checkout: Checkout) -> None:
    checkout.native.unlink()
    assert "faser_trtllm/_native is empty; run ./build.sh setup" in checkout.prepare().stderr
    checkout.env["FASER_VENV"] = str(checkout.path / "nothing")
    assert "nothing is missing; run ./build.sh setup" in checkout.prepare().stderr
