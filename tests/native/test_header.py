"""faser_trtllm/native has the functions and the structures of plugins/cpu/faser_cpu.h, type by type."""

from __future__ import annotations

import re
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.native import structures
from faser_trtllm.native.signatures import SIGNATURES

HEADER = re.sub(
    r"//[^\n]*|/\*.*?\*/",
    "",
    (Path(__file__).parents[2] / "plugins" / "cpu" / "faser_cpu.h").read_text(),
    flags=re.DOTALL,
)
SCALARS: dict[str, Any] = {
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "double": c_double,
    "float": c_float,
    "void": None,
    "const char*": c_char_p,
}
FUNCTIONS = {
    name: (result, arguments)
    for result, name, arguments in re.findall(r"^((?:const )?\w+\*?) (faser_\w+)\(([^;]*)\);", HEADER, re.MULTILINE)
}
STRUCTURES = {
    name: body for body, name in re.findall(r"typedef struct (?:\w+ )?\{([^}]*)\} (faser_\w+);", HEADER, re.DOTALL)
}
OURS = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): kind
    for name, kind in vars(structures).items()
    if name.startswith("Faser")
}


def kind_of(text: str) -> Any:
    """The type of a result or a declaration, whose pointers are all c_void_p."""
    if text in SCALARS:
        return SCALARS[text]
    return c_void_p if "*" in text or "faser_fill_masks" in text else SCALARS[text.split()[0]]


def test_there_is_something_to_compare() -> None:
    assert len(FUNCTIONS) > 30
    assert len(STRUCTURES) > 10


def test_functions_have_the_types_of_the_header() -> None:
    wanted = {
        name: (kind_of(result), [] if arguments == "void" else [kind_of(one.strip()) for one in arguments.split(",")])
        for name, (result, arguments) in FUNCTIONS.items()
    }
    assert wanted == SIGNATURES


@pytest.mark.parametrize("name", OURS)
def test_structures_have_the_fields_of_the_header(name: str) -> None:
    fields = OURS[name]._fields_
    found = [(field, c_void_p if hasattr(kind, "contents") else kind) for field, kind in fields]
    wanted = []
    for declaration in filter(None, (" ".join(line.split()) for line in STRUCTURES[name].split(";"))):
        first, *others = declaration.split(", ")
        kind, _, first = first.rpartition(" ")
        for field in (first, *others):
            one = kind_of(f"{kind}*" if field.startswith("*") else kind)
            field, _, length = field.strip("*]").partition("[")
            wanted.append((field, one * structures.NUM_SOURCES if length else one))
    assert found == wanted
