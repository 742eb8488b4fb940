"""build.sh, in a small checkout whose Python only notes what it is called for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.triton_server import ROOT

PYTHON = """#!/bin/bash
echo "$*" >>"$NOTED"
case "$*" in
  "-Ic "*) echo "$PLACE" ;;
esac
"""


class Checkout:
    """place: where its Python imports the package from."""

    def __init__(self, root: Path) -> None:
        self.path, self.noted = root / "checkout", root / "noted"
        self.place = self.path / "faser_trtllm"
        for name in ("build.sh", "pyproject.toml", "constraints.txt", "plugins/CMakeLists.txt"):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.path / name)
        for name in ("plugins/cpu/op.cpp", "plugins/triton/backend.cpp", "faser_trtllm/_native/libfaser_cpu.so"):
            (self.path / name).parent.mkdir(parents=True)
            (self.path / name).write_text("")
        python = root / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        self.env = os.environ | {"FASER_VENV": str(root / "venv"), "NOTED": str(self.noted), "CXX": "true"}
        self.env.pop("FASER_REQUIRE_HASHES", None)

    def run(self, command: str) -> list[str]:
        """Run ./build.sh COMMAND and return its calls of modules."""
        self.noted.write_text("")
        env = self.env | {"PLACE": str(self.place / "__init__.py")}
        subprocess.run([str(self.path / "build.sh"), command], env=env, check=True, capture_output=True)
        return [line for line in self.noted.read_text().splitlines() if line.startswith("-m ")]

    def setup(self) -> list[str]:
        return [call for call in self.run("setup") if call.startswith("-m pip ")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path.resolve())


def test_setup_installs_once(checkout: Checkout) -> None:
    assert any("-e .[serve,openai]" in call for call in checkout.setup())
    assert checkout.setup() == []
    (checkout.path / "plugins" / "cpu" / "op.cpp").write_text("// changed")
    assert checkout.setup() != []


def test_setup_puts_the_checkout_back_in_the_place_of_a_copy(checkout: Checkout) -> None:
    checkout.setup()
    here, checkout.place = checkout.place, checkout.path.parent / "venv" / "site-packages" / "faser_trtllm"
    assert any("-e .[serve,openai]" in call for call in checkout.setup())
    checkout.place = here
    assert checkout.setup() == []


def test_docs_builds_the_site_with_warnings_as_errors(checkout: Checkout) -> None:
    assert checkout.run("docs")[-1] == "-m sphinx -W --keep-going -q -b html docs build/docs"
