"""Test that shared code has a module of its own: a test module that another imports is run twice and cannot move."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def _imported_modules(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_module_imports_a_test_module():
    modules = {".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in TESTS.rglob("test_*.py")}
    assert len(modules) > 100
    wrong = [
        f"{path.relative_to(TESTS)} imports {module}"
        for path in sorted(TESTS.rglob("*.py"))
        for module in sorted(modules.intersection(_imported_modules(path)))
    ]
    assert not wrong, "move what is shared to tests/support or to a helper module beside the tests"
