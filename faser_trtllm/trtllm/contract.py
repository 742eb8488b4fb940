"""What we use of TensorRT-LLM, as recorded in contract-1.2.json: names, arguments, attributes, and how sure we are.

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

CONTRACT = Path(__file__).parent / "contract-1.2.json"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A default that is an object of the package, by its name there ("LlmRequestState.CONTEXT_INIT")."""

    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the package: a class, an enum, a function or a value.

    init, args and methods hold arguments in the contract's spelling; signature() makes them an inspect.Signature.
    """

    name: str  # dotted, with its module
    kind: str
    source: str
    confidence: str
    binding: str = "python"
    init: Sequence[str] | None = None
    args: Sequence[str] = ()
    methods: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read_write: Sequence[str] = ()
    read_only: Sequence[str] = ()
    instance_attributes: Sequence[str] = ()
    values: Sequence[str] = ()
    abstract: Sequence[str] = ()
    base: str | None = None
    dynamic_attributes: bool = False
    unconfirmed: Sequence[str] = ()

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


def load_contract(path: Path = CONTRACT) -> dict[str, Entry]:
    """Entries by their dotted names."""
    known = set(Entry.__dataclass_fields__)
    return {
        name: Entry(name, **{key: value for key, value in entry.items() if key in known})
        for name, entry in json.loads(path.read_text())["entries"].items()
    }


def signature(arguments: Sequence[str]) -> inspect.Signature:
    """The signature of arguments in the contract's spelling, without self.

    "name", "name=default", "/" behind the positional-only ones, "*" before the keyword-only ones, "*args", "**kwargs".
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
            name, equals, default = argument.partition("=")
            value = _default(default) if equals else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name.rstrip("?"), kind, default=value))
    return inspect.Signature(parameters)


def _default(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return Symbol(text)
