"""The part of TensorRT-LLM's API that we use, as recorded in recorded/*.json, and how sure each entry is.

The adapters are tested against stand-ins generated from it; `faser check --trtllm` compares it with what is installed.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser_trtllm.trtllm.check.type_names import ANYTHING

RECORDED = Path(__file__).parent / "recorded"
SCHEDULER = "scheduler"
DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A default that is an object of the package, by its name there ("LlmRequestState.CONTEXT_INIT")."""

    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the package: a class, an enum, a function or a value.

    init, args and methods hold arguments in the recorded spelling; signature() makes them an inspect.Signature.
    read_write: attribute -> its type. other_modules: where some versions of the release have the name instead.
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
        """Everything that is called with arguments: __init__ and the methods."""
        return ({} if self.init is None else {"__init__": self.init}) | dict(self.methods)


@dataclass(frozen=True, slots=True)
class ApiSurface:
    """The names that one of our adapters uses. recorded_from: in words. entries: by their dotted names."""

    name: str
    release: str
    recorded_from: str
    entries: Mapping[str, Entry]


def load_api_surface(adapter: str, release: str) -> ApiSurface:
    """adapter: SCHEDULER or DRAFTER. release: "1.2"."""
    document = json.loads((RECORDED / f"{adapter}-{release}.json").read_text())
    return ApiSurface(
        adapter,
        document["release"],
        document["recorded_from"],
        {name: _entry(name, entry) for name, entry in document["entries"].items()},
    )


def load_entries(release: str) -> dict[str, Entry]:
    """Everything that is recorded of a release."""
    found: dict[str, Entry] = {}
    for path in sorted(RECORDED.glob(f"*-{release}.json"), reverse=True):
        found |= load_api_surface(path.stem.partition("-")[0], release).entries
    return found


def signature(arguments: Sequence[str]) -> inspect.Signature:
    """The signature of arguments in the recorded spelling, without self."""
    return inspect.Signature(parse_arguments(arguments))


def parse_arguments(arguments: Sequence[str]) -> list[inspect.Parameter]:
    """Arguments as texts -> parameters, whose annotations are texts; defaults that are no literals are Symbols.

    "name: type = default" with both parts optional, "/" after the positional-only ones, "*" before the keyword-only
    ones, "*args", "**kwargs".
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
