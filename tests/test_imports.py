"""Imports run one way (DESIGN section 5), and importing the package needs nothing but the base install."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "faser_trtllm"

LEVELS = [
    {"__init__", "core", "config", "errors", "metrics", "native"},
    {"models", "ops", "kvcache", "partition", "policy"},
    {"builder", "engine", "guided", "sampling"},
    {"scheduler"},
    {"executor", "trtllm"},
    {"profiling", "sim", "serving"},
    {"bench", "commands", "cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def _package_imports(path: Path):
    """Names of faser_trtllm's parts that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "faser_trtllm":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "faser_trtllm" and len(parts) > 1:
                    yield parts[1]


def test_every_part_has_a_level():
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    assert parts <= set(LEVEL), f"give these a level in DESIGN section 5's order: {sorted(parts - set(LEVEL))}"


def test_imports_run_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for imported in _package_imports(path):
            name = "__init__" if imported.startswith("__") else imported
            if LEVEL.get(name, 99) > LEVEL[part]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {imported}")
    assert not wrong, wrong


def test_core_needs_no_heavy_package():
    heavy = [
        "torch",
        "transformers",
        "safetensors",
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
        "import faser_trtllm.cli, faser_trtllm.executor.factory, faser_trtllm.serving.engine_process\n"
        "import faser_trtllm.builder.build, faser_trtllm.serving.supervisor\n"
        "import faser_trtllm.builder.tensorrt_engine\n"
    )
    done = subprocess.run([sys.executable, "-c", blocker], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
