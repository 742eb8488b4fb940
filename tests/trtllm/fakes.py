"""Stand-ins for TensorRT-LLM's modules, generated from the recorded API surface.

Every call is bound with the recorded signature and its values are compared with the recorded types, so an argument that
TensorRT-LLM does not have fails, and so does one of another type, an unknown attribute, or a write to a read-only one.
What the classes do comes from tests/trtllm/rules.py and rules_py.py, or from the caller.
"""

from __future__ import annotations

import abc
import enum
import importlib.machinery
import importlib.metadata
import inspect
import re
import sys
import types

from faser_trtllm.trtllm.gate import DRAFTER_RELEASES, release_of
from lab.trtllm_check.api_surface import Entry, Symbol, load_entries, signature
from tests.trtllm import rules, rules_py
from tests.trtllm.value_types import check_value

VERSION = "1.2.1"


def build(behaviors=None, surface=None, version=VERSION):
    """Return modules by their dotted names. behaviors: classes (or values) by the recorded names, instead of rules'.

    surface: recorded entries by name; default: all that are recorded for the version's release, or for 1.2.
    """
    release = release_of(version) if release_of(version) in DRAFTER_RELEASES else "1.2"
    surface = surface or load_entries(release)
    behaviors = rules.BEHAVIORS | rules_py.behaviors(release) | (behaviors or {})
    modules: dict[str, types.ModuleType] = {}
    objects: dict[str, object] = {}
    for entry in surface.values():
        parent = _module(modules, entry.module)
        if entry.kind == "value":
            made = version if entry.short_name == "__version__" else behaviors[entry.name]
        elif entry.kind == "enum":
            made = enum.Enum(entry.short_name, list(entry.values), module=entry.module, start=0)
        elif entry.kind == "function":
            made = _function(entry, behaviors[entry.name], objects)
        else:
            made = _class(entry, behaviors.get(entry.name), objects.get(entry.base), objects)
        objects[entry.name] = made
        setattr(parent, entry.short_name, made)
    return modules


def install(monkeypatch, modules=None, **options):
    """Put the modules where `import` finds them, for the time of a test -> the modules."""
    modules = modules or build(**options)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: modules["tensorrt_llm"].__version__ if name == "tensorrt-llm" else real(name),
    )
    return modules


def _module(modules, name):
    if name not in modules:
        modules[name] = types.ModuleType(name)
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        modules[name].__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_module(modules, parent), child, modules[name])
    return modules[name]


def _function(entry, behavior, objects):
    recorded = signature(entry.args)

    def call(*args, **kwargs):
        bound = recorded.bind(*args, **kwargs)
        _check_types(entry.short_name, recorded, bound.arguments, objects)
        return behavior(*bound.args, **bound.kwargs)

    call.__name__ = call.__qualname__ = entry.short_name
    call.__signature__ = recorded
    return call


def _class(entry: Entry, behavior, base, objects):
    bases = tuple(part for part in (behavior, base) if part is not None)
    if entry.abstract:
        bases += (abc.ABC,)
    members = {"__module__": entry.module, "_package": objects}
    for name, arguments in entry.callables.items():
        inner = None if behavior is None else getattr(behavior, name, None)
        inner = None if inner is object.__init__ else inner
        members[name] = _method(entry, name, arguments, inner, objects)
        if name in entry.abstract:
            members[name] = abc.abstractmethod(members[name])
    if entry.binding == "nanobind":
        members["__setattr__"] = _guarded(entry, objects)
    elif base is not None:
        members["__setattr__"] = _with_own(entry, base)
    members |= {name: property(_not_modeled) for name in entry.read_only if not hasattr(behavior, name)}
    members |= {name: _stored(name, typed) for name, typed in entry.read_write.items() if not hasattr(behavior, name)}
    made = types.new_class(entry.short_name, bases, exec_body=lambda namespace: namespace.update(members))
    _check_behavior(entry, behavior)
    return made


def _check_behavior(entry, behavior):
    known = {*entry.callables, *entry.read_write, *entry.read_only, *entry.instance_attributes}
    own = [part for part in getattr(behavior, "__mro__", ()) if part.__module__ != "builtins"]
    invented = [name for part in own for name in vars(part) if not name.startswith("_") and name not in known]
    assert not invented, f"the behavior of {entry.name} has names that the API surface does not: {invented}"


def _method(entry, name, arguments, inner, objects):
    recorded = signature(arguments)

    def call(self, *args, **kwargs):
        bound = recorded.bind(*args, **kwargs)
        _check_types(f"{entry.short_name}.{name}", recorded, bound.arguments, objects)
        bound.apply_defaults()
        bound.arguments = {key: _resolve(value, objects) for key, value in bound.arguments.items()}
        if inner is not None:
            return inner(self, *bound.args, **bound.kwargs)
        if name != "__init__":
            raise NotImplementedError(f"{entry.name}.{name} has no behavior here")
        for attribute, value in bound.arguments.items():
            if attribute in {*entry.instance_attributes, *entry.read_write}:
                setattr(self, attribute, value)
        return None

    call.__name__, call.__qualname__ = name, f"{entry.short_name}.{name}"
    if entry.binding == "nanobind":
        call.__nb_signature__ = (nanobind_signature(name, recorded),)
    else:
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = recorded.replace(parameters=[self_parameter, *recorded.parameters.values()])
    return call


def nanobind_signature(name, recorded):
    """Return what nanobind writes: a text in which default i stands as \\i, no doc, then the defaults themselves.

    Arguments without names in the bindings are called arg, or arg0, arg1, ...
    """
    parts, defaults = ["self"], []
    unnamed = [p for p in recorded.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    for place, parameter in enumerate(recorded.parameters.values()):
        if parameter in unnamed:
            parts.append(f"arg{place if len(unnamed) > 1 else ''}: {_as_nanobind_writes(parameter.annotation)}")
            continue
        text = f"{parameter.name}: {_as_nanobind_writes(parameter.annotation)}"
        if parameter.default is not inspect.Parameter.empty:
            text += f" = \\{len(defaults)}"
            defaults.append(parameter.default)
        parts.append(text)
    if unnamed:
        parts.append("/")
    return (f"def {name}({', '.join(parts)}) -> None", None, *defaults)


def _as_nanobind_writes(typed):
    """With modules, and with the abstract names of containers."""
    if typed is inspect.Parameter.empty:
        return "object"
    words = {"list": "collections.abc.Sequence", "dict": "collections.abc.Mapping"}
    return re.sub(r"\w+", lambda word: words.get(word[0], _qualified(word[0])), typed)


def _qualified(word):
    return f"tensorrt_llm.bindings.internal.{word}" if word[0].isupper() and word != "None" else word


def _check_types(where, recorded, arguments, objects):
    for name, value in arguments.items():
        check_value(f"{where}(): {name}", recorded.parameters[name].annotation, value, objects)


def _resolve(value, objects):
    """The object of the package that a symbolic default stands for."""
    if not isinstance(value, Symbol):
        return value
    owner, _, member = value.name.rpartition(".")
    for name, made in objects.items():
        if name.rpartition(".")[2] == owner:
            return getattr(made, member)
    return None


def _guarded(entry, objects):
    allowed = {*entry.read_write, *entry.instance_attributes}

    def set_attribute(self, name, value):
        free = name.startswith("_") or (entry.dynamic_attributes and name.startswith("py_"))
        if name in entry.read_only:
            raise AttributeError(f"property {name!r} of {entry.short_name!r} object has no setter")
        if name not in allowed and not free:
            raise AttributeError(f"{entry.short_name!r} object has no attribute {name!r}")
        check_value(f"{entry.short_name}.{name}", entry.read_write.get(name, "object"), value, objects)
        object.__setattr__(self, name, value)

    return set_attribute


def _with_own(entry, base):
    """A Python class over a bound one: the attributes recorded for it, and those that its base guards."""

    def set_attribute(self, name, value):
        set_it = object.__setattr__ if name in entry.instance_attributes else base.__setattr__
        set_it(self, name, value)

    return set_attribute


def _stored(name, typed):
    """A property over a place of its own, as nanobind's def_rw makes."""

    def get(self):
        try:
            return self.__dict__[f"_stored_{name}"]
        except KeyError:
            raise NotImplementedError(f"{name} is recorded, but the stand-in does not model it") from None

    def put(self, value):
        self.__dict__[f"_stored_{name}"] = value

    put.__nb_signature__ = ((f"def (self, arg: {_as_nanobind_writes(typed)}, /) -> None", None),)
    return property(get, put)


def _not_modeled(self):
    raise NotImplementedError("this attribute is recorded, but the stand-in does not model it")
