"""The part of TensorRT-LLM's API that we use, recorded in recorded/*.json with our confidence in each entry.

The adapters are tested against stand-ins generated from it; `faser check --trtllm` compares it with the installation.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.trtllm_check.type_names import ANYTHING

RECORDED = Path(__file__).parent / "recorded"
SCHEDULER = "scheduler"
DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A default that is an object of the package, by name ("LlmRequestState.CONTEXT_INIT")."""

    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the package: a class, an enum, a function or a value.

    init, args and methods hold arguments in the recorded spelling; signature() makes them an inspect.Signature.
    read_write: types by attribute. other_modules: modules that have the name in some versions of the release.
    """

    name: str  # dotted, with its module
    kind: str
    source: str
    confidence: str
    binding: str = "python"
    init: Sequence[str] | None = None
    args: Sequence[str] = ()
    methods: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read_write: Mapping[str, str] = field(default_factory=dict)
    read_only: Sequence[str] = ()
    instance_attributes: Sequence[str] = ()
    values: Sequence[str] = ()
    abstract: Sequence[str] = ()
    base: str | None = None
    dynamic_attributes: bool = False
    unconfirmed: Sequence[str] = ()
    other_modules: Sequence[str] = ()

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def callables(self) -> dict[str, Sequence[str]]:
        """The recorded arguments of each method by its name, __init__ included."""
        return ({} if self.init is None else {"__init__": self.init}) | dict(self.methods)


@dataclass(frozen=True, slots=True)
class ApiSurface:
    """The names that one of our adapters uses. recorded_from: the source in words. entries: by dotted name."""

    name: str
    release: str
    recorded_from: str
    entries: Mapping[str, Entry]


def load_api_surface(adapter: str, release: str) -> ApiSurface:
    """Load the names that an adapter (SCHEDULER or DRAFTER) uses of a release such as "1.2"."""
    document = json.loads((RECORDED / f"{adapter}-{release}.json").read_text())
    return ApiSurface(
        adapter,
        document["release"],
        document["recorded_from"],
        {name: _entry(name, entry) for name, entry in document["entries"].items()},
    )


def load_entries(release: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in sorted(RECORDED.glob(f"*-{release}.json"), reverse=True):
        found |= load_api_surface(path.stem.partition("-")[0], release).entries
    return found


def signature(arguments: Sequence[str]) -> inspect.Signature:
    """Return the signature of arguments in the recorded spelling, without self."""
    return inspect.Signature(parse_arguments(arguments))


def parse_arguments(arguments: Sequence[str]) -> list[inspect.Parameter]:
    """Parse "name: type = default" (both parts optional), "/", "*", "*args" and "**kwargs" as in Python.

    Annotations are texts; defaults that are not literals become Symbols.
    """
    parameters: list[inspect.Parameter] = []
    kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for argument in arguments:
        if argument == "/":
            parameters = [parameter.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for parameter in parameters]
        elif argument == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif argument.startswith("**"):
            parameters.append(inspect.Parameter(argument[2:], inspect.Parameter.VAR_KEYWORD))
        elif argument.startswith("*"):
            parameters.append(inspect.Parameter(argument[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            declared, equals, default = argument.partition("=")
            name, typed = _name_and_type(declared)
            value = _default(default.strip()) if equals else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name.rstrip("?"), kind, default=value, annotation=typed))
    return parameters


def is_unconfirmed(argument: str) -> bool:
    return "?" in argument.partition("=")[0].partition(":")[0]


def _entry(name: str, data: Mapping[str, Any]) -> Entry:
    known = {key: value for key, value in data.items() if key in Entry.__dataclass_fields__}
    read_write = dict(map(_name_and_type, data.get("read_write", ())))
    return Entry(name, **known | {"read_write": read_write})


def _name_and_type(declared: str) -> tuple[str, str]:
    name, _, typed = declared.partition(":")
    return name.strip(), typed.strip() or ANYTHING


def _default(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return Symbol(text)
