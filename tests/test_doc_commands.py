"""Commands of the documents run as they stand there; those that cannot run here are marked, and their flags exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from faser_trtllm.commands.table import COMMANDS, load
from tests.support.effort import ONLY_ALL
from tests.support.triton_server import ROOT

MARKS = {"server", "gpu", "external"}  # keeps running; needs a GPU; needs Docker, a checkpoint or other software
FENCE = re.compile(r"(?:<!-- (\w+) -->\n)?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md"))


class Block(NamedTuple):
    page: str
    mark: str
    commands: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(page.name, mark or "", text) for mark, text in FENCE.findall(page.read_text())]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
START = [block for block in BLOCKS if block.page == "quickstart.md" and not block.mark]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout, with the engines that the quick start builds."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "engines").mkdir()
    for name in ("engines/demo", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for block in START:
        run(block, folder)
    return folder


def run(block: Block, folder: Path) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-e", "-c", block.commands],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block.page}: {block.commands}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@ONLY_ALL
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if not b.mark and b not in START], ids=lambda b: f"{b.page}: {b.commands[:60]}"
)
def test_a_command_without_a_mark_runs(block: Block, checkout: Path) -> None:
    run(block, checkout)


def test_marks_are_known() -> None:
    assert {block.mark for block in BLOCKS} - {""} == MARKS
    assert sum(not block.mark for block in BLOCKS) > 10


def commands_of(text: str) -> list[list[str]]:
    """The words of each `faser COMMAND`, without comments and what is piped on."""
    joined = text.replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines() if re.search(r"\bfaser ", line)]
    return [words[words.index("faser") + 1 :] for words in lines if "faser" in words]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for name, *words in commands_of(block):
            if name == "bench" or name.startswith("-"):
                continue
            assert name in COMMANDS, f"{page.name}: there is no command {name!r}"
            known = {flag for parameter in typer.main.get_command(load(name)).params for flag in parameter.opts}
            known |= {"--help", "--no_profile"}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= known, f"{page.name}: faser {name} has no {given - known}"
