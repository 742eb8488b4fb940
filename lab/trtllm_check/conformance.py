"""Compare the recorded API surface with an installed TensorRT-LLM: names, arguments, types, attributes and values."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lab.trtllm_check.api_surface import Entry, Symbol, is_unconfirmed, parse_arguments, signature
from lab.trtllm_check.type_names import annotation_text, differ

_EMPTY = inspect.Parameter.empty
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one entry of the API surface. problems: differences. unseen: parts that cannot be inspected."""

    name: str
    problems: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def compare(surface: Mapping[str, Entry]) -> list[Finding]:
    """Return a finding per entry of the API surface; imports the package's modules."""
    return [_compare_entry(entry) for entry in surface.values()]


def _compare_entry(entry: Entry) -> Finding:
    try:
        found = getattr(_import_first(entry.module, entry.other_modules), entry.short_name)
    except ImportError as error:
        return Finding(entry.name, (f"{entry.module} cannot be imported: {str(error).splitlines()[0]}",))
    except AttributeError:
        return Finding(entry.name, ("it is gone",))
    problems: list[str] = []
    unseen: list[str] = []
    if entry.kind == "enum":
        problems += [f"value {value} is gone" for value in entry.values if not hasattr(found, value)]
    elif entry.kind == "function":
        problems += _compare_call("", found, entry.args, unseen)
    elif entry.kind == "class":
        for name, arguments in entry.callables.items():
            if not hasattr(found, name):
                problems.append(f"method {name} is gone")
            elif not (name == "__init__" and not arguments):
                problems += _compare_call(name, getattr(found, name), arguments, unseen)
        problems += _compare_attributes(entry, found)
        missing = [name for name in entry.instance_attributes if not _has_instance_attribute(found, name)]
        source = _source(found) if missing else ""
        if missing and source is None:
            unseen.append("attributes that only an instance has: " + ", ".join(missing))
        else:
            problems += [f"attribute {name} is gone" for name in missing if not re.search(rf"\b{name}\b", source or "")]
    return Finding(entry.name, tuple(problems), tuple(unseen))


def _import_first(module: str, others: Sequence[str]) -> ModuleType:
    """Import the first of the modules that exists; raise the ImportError of `module` if none does."""
    try:
        return importlib.import_module(module)
    except ImportError:
        for other in others:
            with contextlib.suppress(ImportError):
                return importlib.import_module(other)
        raise


def _compare_attributes(entry: Entry, found: type) -> Iterator[str]:
    for name in (*entry.read_write, *entry.read_only):
        attribute = inspect.getattr_static(found, name, None)
        if attribute is None:
            yield f"attribute {name} is gone"
        elif name in entry.read_write and isinstance(attribute, property):
            if attribute.fset is None:
                yield f"attribute {name} cannot be written"
                continue
            installed = _written_type(attribute.fset)
            if differ(entry.read_write[name], installed):
                yield f"attribute {name} is of type {installed}, recorded is {entry.read_write[name]}"


def _written_type(setter: Any) -> str:
    """Return the type that a property's setter takes, "" if it is unknown."""
    for parameters in installed_signatures(setter):
        if parameters:
            return annotation_text(parameters[-1].annotation)
    return ""


def _has_instance_attribute(found: type, name: str) -> bool:
    """Return True if the class declares the attribute: a property, an annotation, or a field of a model."""
    fields = getattr(found, "model_fields", {})
    return (
        hasattr(found, name) or name in fields or any(name in vars(c).get("__annotations__", {}) for c in found.__mro__)
    )


def _source(found: type) -> str | None:
    """Return the source of a class and its bases in the same package; None if there is none."""
    texts = []
    for part in found.__mro__:
        if part.__module__.split(".")[0] != found.__module__.split(".")[0]:
            continue
        try:
            texts.append(inspect.getsource(part))
        except (OSError, TypeError):
            continue
    return "\n".join(texts) or None


def _compare_call(name: str, found: Any, arguments: Sequence[str], unseen: list[str]) -> list[str]:
    """Return problems with a call as recorded, for the overload with the fewest problems."""
    overloads = installed_signatures(found)
    where = f"{name}: " if name else ""
    if not overloads:
        unseen.append(f"{where}its arguments")
        return []
    return min(([where + p for p in _compare_arguments(arguments, o)] for o in overloads), key=len)


def _compare_arguments(arguments: Sequence[str], installed: Sequence[inspect.Parameter]) -> Iterator[str]:
    recorded = [p for p in signature(arguments).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unnamed = [p for p in recorded if p.kind is p.POSITIONAL_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in installed)
    positional = [p for p in installed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if unnamed or not recorded:
        required = sum(p.default is _EMPTY for p in positional)
        if not required <= len(unnamed) <= len(positional):
            yield f"takes {required} to {len(positional)} arguments, recorded are {len(unnamed)}"
            return
        for ours, theirs in zip(unnamed, positional, strict=False):
            yield from _compare_types(ours, theirs)
        return
    if any(a.startswith("*") and len(a) > 1 and not a.startswith("**") for a in arguments):
        return  # it accepts any arguments
    loose = {name for argument in arguments if is_unconfirmed(argument) for name in signature([argument]).parameters}
    by_name = {p.name: p for p in installed}
    for parameter in recorded:
        known = by_name.get(parameter.name)
        if known is None:
            if parameter.name not in loose and not takes_any:
                yield f"argument {parameter.name} is gone"
        elif known.kind not in _NAMED:
            yield f"argument {parameter.name} cannot be given by name"
        elif any(_compare_types(parameter, known)):
            yield from _compare_types(parameter, known)
        elif _differs(parameter.default, known.default):
            yield f"argument {parameter.name} has the default {known.default!r}, recorded is {parameter.default!r}"
    order = [p.name for p in installed if p.name in {r.name for r in recorded}]
    if recorded[0].kind is not inspect.Parameter.KEYWORD_ONLY and order != [
        r.name for r in recorded if r.name in order
    ]:
        yield "the order of its arguments differs"
    names = {r.name for r in recorded}
    new = [p.name for p in installed if p.kind in _NAMED and p.name not in names and p.default is _EMPTY]
    for name in new[len(loose - set(by_name)) :]:
        yield f"argument {name} is new and has no default"


def _compare_types(recorded: inspect.Parameter, installed: inspect.Parameter) -> Iterator[str]:
    told = annotation_text(installed.annotation)
    if differ(recorded.annotation, told, may_be_none=installed.default is None):
        yield f"argument {recorded.name} is of type {told}, recorded is {recorded.annotation}"


def _differs(recorded: Any, installed: Any) -> bool:
    """Return True if a default differs; for objects of the package it only has to exist."""
    if recorded is _EMPTY or installed is _EMPTY:
        return recorded is not _EMPTY
    return not isinstance(recorded, Symbol) and recorded != installed and not callable(installed)


def installed_signatures(found: Any) -> list[list[inspect.Parameter]]:
    """Return each overload's parameters without self, from nanobind's or Python's signature, or from the docstring."""
    texts = [(entry[0], entry[2:]) for entry in getattr(found, "__nb_signature__", ())]
    if not texts:
        try:
            parameters = list(inspect.signature(found).parameters.values())
            return [[p for p in parameters if p.name != "self"]]
        except (TypeError, ValueError):
            lines = (getattr(found, "__doc__", None) or "").splitlines()
            texts = [(line, ()) for line in lines if re.match(r"\w+\(.*\)", line)]
    return [parse_signature(text, defaults) for text, defaults in texts]


def parse_signature(text: str, defaults: Sequence[Any] = ()) -> list[inspect.Parameter]:
    r"""Parse nanobind's "def f(self, a: int, b: bool = \0, /) -> None", where \0 stands for defaults[0]."""
    written = [part for part in _split(text[text.index("(") + 1 :]) if not re.match(r"self\b", part)]

    def value(default: Any) -> Any:
        place = re.fullmatch(r"\\(\d+)", default.name) if isinstance(default, Symbol) else None
        return defaults[int(place[1])] if place and int(place[1]) < len(defaults) else default

    return [parameter.replace(default=value(parameter.default)) for parameter in parse_arguments(written)]


def _split(text: str) -> Iterator[str]:
    """Yield the arguments of a call's text up to its closing bracket, split at commas outside brackets and quotes."""
    depth, start, quote = 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
        elif character == ")" or (character == "," and not depth):
            if text[start:place].strip():
                yield text[start:place].strip()
            if character == ")":
                return
            start = place + 1
