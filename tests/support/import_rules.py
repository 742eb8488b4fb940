"""The imports of a package's modules, read from their source, and those that break a rule.

Every import counts, inside functions and under TYPE_CHECKING too: a cycle that only the type checker sees is one that
the reader sees as well. The "module:name" strings of a registry are no imports, since whoever looks one up knows no
more than its signature; they must name what exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MAX_FILES = 16  # source files in a folder, beside __init__.py


@dataclass(frozen=True)
class Import:
    """module, name: of `from module import name`; name is None for `import module`. in_function: not run on import."""

    file: Path  # within the package's folder
    line: int
    module: str
    name: str | None
    in_function: bool

    def __str__(self) -> str:
        what = f"{self.module}.{self.name}" if self.name else self.module
        return f"{self.file}:{self.line} imports {what}"


class Package:
    """A package's source tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name

    @cached_property
    def trees(self) -> Mapping[str, tuple[Path, ast.Module]]:
        """The file of each module within the folder, and its syntax tree."""
        found = {}
        for name in sorted(glob("**/*.py", root_dir=self.folder, recursive=True)):  # follows builder/plugins, a link
            file, path = Path(name), self.folder / name
            module = ".".join((self.name, *file.with_suffix("").parts)).removesuffix(".__init__")
            found[module] = file, ast.parse(path.read_text())
        return found

    @cached_property
    def imports(self) -> Sequence[Import]:
        """All that its modules import, of itself and of others."""
        return [found for file, tree in self.trees.values() for found in _imports(tree, file)]

    @property
    def own_imports(self) -> Iterator[Import]:
        return (found for found in self.imports if found.module.split(".")[0] == self.name)

    @property
    def parts(self) -> set[str]:
        """The folders and modules at the top level."""
        return {file.parts[0].removesuffix(".py") for file, _ in self.trees.values()} - {"__init__"}

    def target(self, found: Import) -> str:
        """The module that an import of our own reads."""
        submodule = f"{found.module}.{found.name}"
        return submodule if found.name and submodule in self.trees else found.module

    def defines(self, module: str, name: str) -> bool:
        if f"{module}.{name}" in self.trees:
            return True
        return module in self.trees and name in _names(self.trees[module][1].body)


def missing(package: Package) -> list[str]:
    """Imports of our own modules or names that do not exist, and registry strings that name none."""
    wrong = []
    for found in package.own_imports:
        exists = found.module in package.trees
        if not exists or (found.name and not package.defines(found.module, found.name)):
            wrong.append(f"{found}, which does not exist")
    pattern = re.compile(rf"({package.name}(?:\.\w+)+):(\w+)")
    for file, tree in package.trees.values():
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            match = pattern.fullmatch(text)
            if match and not package.defines(match[1], match[2]):
                wrong.append(f"{file}:{node.lineno} names {text}, which does not exist")
    return wrong


def out_of_order(package: Package, order: Sequence[str]) -> list[str]:
    """Where the parts are not those of `order`, and imports of a part that stands later in it than the importer."""
    wrong = [f"{part} has no place in the order" for part in sorted(package.parts - set(order))]
    wrong += [f"{part} is in the order and does not exist" for part in order if part not in package.parts]
    place = {part: index for index, part in enumerate(order)}
    for found in package.own_imports:
        importer, imported = found.file.parts[0].removesuffix(".py"), _part(package.target(found))
        if place.get(imported, -1) > place.get(importer, len(order)):
            wrong.append(f"{found}: {imported} stands above {importer}")
    return wrong


def cycles(package: Package) -> list[str]:
    """One cycle between rooms, or else one inside a room that has drawers, if there is any. A room is a part's own
    modules, or a folder of the part with all that is in it; a drawer is a folder of a room, and counts as a module."""
    files = [file for file, _ in package.trees.values()]
    with_drawers = {_room(file) for file in files if len(file.parts) > 3}

    def module(file: Path) -> str:
        whole = file.with_suffix("").parts
        return ".".join(whole[:3]) if _room(file) in with_drawers else _room(file)

    for name_of in (_room, module):
        edges: dict[str, set[str]] = {}
        for found in package.own_imports:
            importer, imported = name_of(found.file), name_of(package.trees[package.target(found)][0])
            if importer != imported:
                edges.setdefault(importer, set()).add(imported)
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            return [" imports ".join(reversed(error.args[1]))]
    return []


def crowded(package: Package) -> list[str]:
    """Folders with more than MAX_FILES source files."""
    counts: dict[Path, int] = {}
    for file, _ in package.trees.values():
        counts[file.parent] = counts.get(file.parent, 0) + (file.name != "__init__.py")
    return [f"{folder} has {n} files, {MAX_FILES} are allowed" for folder, n in counts.items() if n > MAX_FILES]


def imported_at_once(package: Package, other: str) -> list[str]:
    """Where another package is imported when a module of this one is, not by a function that is called."""
    return [str(found) for found in package.imports if found.module.split(".")[0] == other and not found.in_function]


def _imports(tree: ast.Module, file: Path) -> Iterator[Import]:
    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name, None, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} has a relative import; write the whole name"
            for alias in node.names:
                yield Import(file, node.lineno, str(node.module), alias.name, in_function)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    return visit(tree, False)


def _names(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements bind at their own level."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for field in ("body", "orelse", "finalbody"):
                names |= _names(getattr(node, field, ()))
            names |= {name for handler in getattr(node, "handlers", ()) for name in _names(handler.body)}
        else:
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            names |= {n.id for n in stored}
    return names


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def _room(file: Path) -> str:
    if len(file.parts) == 1:
        return file.stem
    return ".".join(file.parts[:-1][:2])
