"""Tests that the targets of documents exist: links between them, and the files that the glossary names."""

import re
import subprocess

import pytest

from tests.support.triton_server import ROOT

TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()
DOCUMENTS = [path for path in TRACKED if (ROOT / path).is_file()]
WITH_PATHS = {"docs/glossary.md": "faser_trtllm", "CONTRIBUTING.md": ".", "docs/threat_model.md": "tests"}


def anchors_of(text):
    """GitHub's names of the headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path):
    file = ROOT / path
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (file.parent / name) if name else file
        assert target.exists(), f"{path} links to {link}, which is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target.read_text()), f"{path} links to {link}, which has no such heading"


@pytest.mark.parametrize("path", sorted(WITH_PATHS))
def test_files_that_are_named_exist(path):
    """Backticked paths, but for those of an op, policy or backend that is still to be written."""
    named = re.findall(r"`([\w./*]+/[\w./*]*\.?\w*)`", (ROOT / path).read_text())
    named = [name for name in named if not re.search(r"(^|/)(test_)?x\.", name)]
    assert named
    for name in named:
        places = [ROOT / WITH_PATHS[path], ROOT / "faser_trtllm", ROOT]
        assert any(list(place.glob(name)) for place in places), f"{path} names {name}, which is not there"


def test_installations_keep_the_checkout():
    """Without -e pip would put a copy in its place. Images of deploy/ have nothing but the copy."""
    installed = re.compile(r"pip install([^\n`]*?)\s['\"]?\.(?![\w./-])")
    command = ["git", "grep", "--untracked", "-l", "pip install", "--", ":!CHANGELOG.md", ":!deploy", ":!build.sh"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    found = [(path, flags) for path in paths for flags in installed.findall((ROOT / path).read_text(errors="replace"))]
    assert len(found) > 10
    assert [path for path, flags in found if not flags.endswith("-e")] == []


def test_nothing_says_to_install_the_project_by_a_name_that_no_index_has():
    """Outside pyproject.toml, where the name means the project itself."""
    wrong = re.compile(r"install\s+['\"]?faser[-_]trtllm|faser[-_]trtllm\[")
    command = ["git", "grep", "--untracked", "-lE", "faser[-_]trtllm", "--", ":!pyproject.toml", ":!CHANGELOG.md"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert paths
    assert [path for path in paths if wrong.search((ROOT / path).read_text(errors="replace"))] == []
