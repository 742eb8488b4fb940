"""Documents stay short, and constructions that make English hard to read stay out of the package and its documents."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.triton_server import ROOT

BUDGETS = {"README.md": 900, "ARCHITECTURE.md": 1_500}
MAX_DOCS_WORDS = 20_000
PACKAGES = ("faser_trtllm", "plugins", "benchmarks", "lab", "scripts", "examples")
PLACES = (*PACKAGES, "triton_model_repo", "engines", "deploy", "docs", ".github")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "build.sh", "pyproject.toml")
SUFFIXES = {".py", ".md", ".cpp", ".h", ".cu", ".cuh", ".yaml", ".yml", ".pbtxt", ".sh", ".toml", ".conf"}
BANNED = {
    "write after, or next to": (
        r"\bbehind\b(?! (NVIDIA |a real )?Triton| an? (reverse )?proxy| the proxy| a load balancer)"
    ),
    "write next to, or alongside": r"\bbeside\b",
    "say that it changes": r"\b(is|are) another\b",
    "start with the subject": r"\b(Read|Wanted) (is|are)\b",
    "write distribution": r"\blaws?\b",
    "write random draw": r"\bcoins?\b",
    "write step, or tile": r"\bstair(s|case|cases)?\b",
    "write rejection sampling": r"\bfree test\b",
    "name the state": r"\bmoods?\b",
    "spell as in the United States": (
        r"(?i)(quanti|normali|recogni|initiali|seriali|maximi|minimi|synchroni)s(e|ed|es|ing|ation)\b"
        r"|favour|behaviour|neighbour|colour|modelled|labelled"
    ),
}
DOCSTRING_STARTS = ("Of", "As", "Those", "What", "Whether", "By", "->")


def tracked(*places: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).suffix in SUFFIXES and (ROOT / name).is_file()]


def found_in(text: str) -> list[tuple[str, str]]:
    """Advice and line of each banned construction."""
    lines = text.splitlines()
    return [(advice, line.strip()) for line in lines for advice, banned in BANNED.items() if re.search(banned, line)]


def docstrings_of(source: str) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, nodes))
    return [text for text in found if text]


@pytest.mark.parametrize("page", sorted(BUDGETS))
def test_a_page_keeps_to_its_budget(page: str) -> None:
    assert len((ROOT / page).read_text().split()) <= BUDGETS[page]


def test_the_documents_keep_to_their_budget() -> None:
    pages = [path for path in tracked("docs") if path.suffix == ".md"]
    assert len(pages) > 10
    assert sum(len(path.read_text().split()) for path in pages) <= MAX_DOCS_WORDS


@pytest.mark.parametrize("place", [*PLACES, *PAGES])
def test_no_banned_construction(place: str) -> None:
    paths = tracked(place)
    assert paths
    found = [(str(path.relative_to(ROOT)), *hit) for path in paths for hit in found_in(path.read_text())]
    assert found == []


@pytest.mark.parametrize("place", [*PACKAGES, "engines", "tests"])
def test_docstrings_say_what_something_is_or_does(place: str) -> None:
    texts = [
        (path, text) for path in tracked(place) if path.suffix == ".py" for text in docstrings_of(path.read_text())
    ]
    assert texts
    found = [f"{path.relative_to(ROOT)}: {text[:60]}" for path, text in texts if text.split()[0] in DOCSTRING_STARTS]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_banned"),
    [
        ("the tokens behind a stop word", True),
        ("served behind NVIDIA Triton, behind a proxy", False),
        ("rows beside those of prompts; besides", True),
        ("the batch is another in the next step", True),
        ("Read is the layout of GPTQ", True),
        ("a draft keeps its law", True),
        ("the curve's stairs are tiles", True),
        ("Prompt tokens read are counted; lawful", False),
        ("_dequantised rows", True),
        ("the modelled time", True),
        ("a parallel series of models", False),
    ],
)
def test_the_check_sees_a_banned_construction(line: str, is_banned: bool) -> None:
    assert bool(found_in(line)) == is_banned
