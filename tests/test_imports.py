"""Imports run one way and name what exists, and importing the package needs nothing but the base install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_rules import MAX_FILES, Package, crowded, cycles, imported_at_once, missing, out_of_order

FOLDER = Path(__file__).parent.parent / "faser_trtllm"

ORDER = (
    "errors",
    "json_text",
    "acceptance_curves",
    "config",
    "checkout",
    "native",
    "backends",
    "core",
    "models",
    "ops",
    "fingerprint",
    "partition",
    "kvcache",
    "policy",
    "sampling",
    "guided",
    "builder",
    "engine",
    "drafters",
    "scheduler",
    "executor",
    "trtllm",
    "profiling",
    "serving",
    "commands",
    "cli",
)
"""The package from the ground up: a part imports those before it only."""
LAB_ORDER = (
    *("clock", "delegating_engine", "faults", "reference"),
    *("costmodel", "simulation", "interpreted", "trtllm_check", "planner"),
)


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(FOLDER)


@pytest.fixture(scope="module")
def lab() -> Package:
    return Package(FOLDER.parent / "lab")


def test_what_is_imported_exists(package: Package) -> None:
    assert missing(package) == []


def test_parts_import_those_before_them(package: Package) -> None:
    assert out_of_order(package, ORDER) == []


def test_rooms_do_not_import_each_other(package: Package) -> None:
    assert cycles(package) == []


def test_no_folder_is_crowded(package: Package) -> None:
    assert crowded(package) == []


@pytest.mark.parametrize("part", ["benchmarks", "lab"])
def test_benchmarks_and_the_lab_are_for_a_checkout(package: Package, part: str) -> None:
    assert imported_at_once(package, part) == []


def test_the_lab_keeps_the_same_rules(lab: Package) -> None:
    assert missing(lab) == out_of_order(lab, LAB_ORDER) == cycles(lab) == crowded(lab) == []
    assert imported_at_once(lab, "benchmarks") == []


def test_core_needs_no_heavy_package() -> None:
    heavy = [
        "benchmarks",
        "lab",
        "torch",
        "transformers",
        "tritonclient",
        "tensorrt",
        "tensorrt_rtx",
        "tensorrt_llm",
        "opentelemetry",
        "starlette",
        "uvicorn",
        "jinja2",
        "openai",
        "llguidance",
        "cuda",
        "matplotlib",
    ]
    blocker = (
        "import sys\n"
        f"for name in {heavy!r}: sys.modules[name] = None\n"
        "import faser_trtllm.cli, faser_trtllm.executor.factory, faser_trtllm.serving.engine_process.opening\n"
        "import faser_trtllm.builder.build, faser_trtllm.serving.engine_process.main\n"
        "import faser_trtllm.builder.tensorrt_engine\n"
    )
    done = subprocess.run([sys.executable, "-c", blocker], capture_output=True, text=True, cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr


def make(root: Path, files: dict[str, str]) -> Package:
    """A package `pkg` of these files."""
    for name, text in ({"__init__.py": "VERSION = 1\n"} | files).items():
        path = root / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return Package(root / "pkg")


GOOD = {
    "low.py": "if True:\n    LIMIT, OTHER = 1, 2\nclass Thing: ...\n",
    "high/room/a.py": "from pkg import VERSION\nfrom pkg.low import LIMIT, OTHER, Thing\nimport pkg.high.b\n",
    "high/b.py": "from pkg import low\nOPENER = 'pkg.high.room.a:LIMIT'\n",
}


def test_a_good_tree_breaks_no_rule(tmp_path: Path) -> None:
    package = make(tmp_path, GOOD)
    found = missing(package) + out_of_order(package, ("low", "high")) + cycles(package) + crowded(package)
    assert found + imported_at_once(package, "pkg_benchmarks") == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from pkg.gone import x", "low.py:1 imports pkg.gone.x, which does not exist"),
        ("import pkg.gone", "low.py:1 imports pkg.gone, which does not exist"),
        ("from pkg.high.b import Opener", "low.py:1 imports pkg.high.b.Opener, which does not exist"),
        ("def f():\n    from pkg.high.b import f", "low.py:2 imports pkg.high.b.f, which does not exist"),
        ("NAME = 'pkg.high.b:Opener'", "low.py:1 names pkg.high.b:Opener, which does not exist"),
    ],
)
def test_what_does_not_exist_is_found(tmp_path: Path, source: str, problem: str) -> None:
    package = make(tmp_path, {"low.py": source, "high/b.py": "def g():\n    Opener = 1\n"})
    assert missing(package) == [problem]


@pytest.mark.parametrize(
    "source",
    [
        "import pkg.high.b",
        "from pkg.high.b import x",
        "def f():\n    from pkg.high import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.high.b import x",
    ],
)
def test_an_import_upwards_is_found(tmp_path: Path, source: str) -> None:
    package = make(tmp_path, {"low.py": source, "high/b.py": "x = 1\n"})
    assert [line.partition(": ")[2] for line in out_of_order(package, ("low", "high"))] == ["high stands above low"]


def test_the_order_must_be_that_of_the_parts_that_exist(tmp_path: Path) -> None:
    package = make(tmp_path, GOOD)
    assert out_of_order(package, ("low", "middle", "high")) == ["middle is in the order and does not exist"]
    assert out_of_order(package, ("low",)) == ["high has no place in the order"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one.py", "two/b.py"),
        ("part/one/a.py", "part/two/b.py"),
        ("part/a.py", "part/room/b.py"),
    ],
)
def test_a_cycle_is_found(tmp_path: Path, first: str, second: str) -> None:
    modules = ["pkg." + name.removesuffix(".py").replace("/", ".") for name in (first, second)]
    files = {first: f"import {modules[1]}\n", second: f"def f():\n    import {modules[0]}\n"}
    (cycle,) = cycles(make(tmp_path, files))
    assert cycle.count(" imports ") == 2


def test_a_drawer_may_import_of_its_room_what_does_not_import_it(tmp_path: Path) -> None:
    files = {"part/room/a.py": "import pkg.part.room.drawer.b\n", "part/room/drawer/b.py": "import pkg.part.room.c\n"}
    files |= {"part/room/c.py": "import pkg.part.room.d\n", "part/room/d.py": ""}
    assert cycles(make(tmp_path, files)) == []
    files["part/room/d.py"] = "import pkg.part.room.a\n"
    (cycle,) = cycles(make(tmp_path, files))
    assert {"part.room.a", "part.room.drawer"} <= set(cycle.split(" imports "))


def test_a_crowd_is_found(tmp_path: Path) -> None:
    files = {f"part/module_{index}.py": "" for index in range(MAX_FILES + 1)}
    assert crowded(make(tmp_path, files)) == [f"part has {MAX_FILES + 1} files, {MAX_FILES} are allowed"]


def test_an_import_of_benchmarks_at_once_is_found(tmp_path: Path) -> None:
    late = "def f():\n    from benchmarks.peers import x\n"
    package = make(tmp_path, {"late.py": late, "now.py": "if True:\n    from benchmarks.peers import x\n"})
    assert imported_at_once(package, "benchmarks") == ["now.py:2 imports benchmarks.peers.x"]
