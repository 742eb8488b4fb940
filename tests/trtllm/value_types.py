"""Checks that a value is of a recorded type: as strict as nanobind, or stricter."""

from __future__ import annotations

from lab.trtllm_check.type_names import alternatives, split

_EXACT = {"int": int, "bool": bool, "str": str}


def check_value(where, recorded, value, objects):
    """Raise TypeError for a value of none of the recorded alternatives. objects: the stand-ins by their names."""
    choices = alternatives(recorded) if isinstance(recorded, str) else ()
    if choices and not any(_fits(choice, value, objects) for choice in choices):
        raise TypeError(f"{where} is {value!r}, recorded is {recorded}: incompatible function arguments")


def _fits(choice, value, objects):
    if choice == "None":
        return value is None
    if choice in _EXACT:
        return type(value) is _EXACT[choice]
    if choice == "float":
        return type(value) in (int, float)
    container, _, inside = choice.removesuffix("]").partition("[")
    parts = split(inside, ",")
    if container == "list":
        return isinstance(value, (list, tuple)) and all(_fits(parts[0], item, objects) for item in value)
    if container == "tuple":
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, parts, value, [objects] * 9))
    if container == "dict":
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_fits(parts[0], key, objects) and _fits(parts[1], item, objects) for key, item in pairs)
    return _is_a(choice, value, objects)


def _is_a(name, value, objects):
    """Return whether the value is of a recorded class of that name. There may be two; without one, nothing is."""
    known = [made for full, made in objects.items() if full.rpartition(".")[2] == name and isinstance(made, type)]
    return isinstance(value, tuple(known))
