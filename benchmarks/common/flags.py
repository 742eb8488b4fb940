"""Flags that fill the options of a bench, a frozen dataclass."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar, cast, get_args, get_type_hints

from faser_trtllm.errors import InvalidArgumentError

T = TypeVar("T")


class Flags(argparse.ArgumentParser, Generic[T]):
    """A parser of the flags of `faser bench NAME`, with types and defaults of an options dataclass.

    Tuples are spelled with commas, as in 1,4,8. Options with a method quick() have a flag --quick.
    """

    def __init__(self, name: str, options: type[T], about: str | None, example: str) -> None:
        super().__init__(
            prog=f"faser bench {name}",
            description=about,
            epilog=example,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._make: Callable[..., T] = options
        self._type_of = get_type_hints(options)
        self._default_of = {field.name: field.default for field in fields(options)}  # type: ignore[arg-type]
        if hasattr(options, "quick"):
            text = "a short run for a first look; its numbers are too noisy to quote"
            self.add_argument("--quick", action="store_true", help=text)

    def flag(self, field: str, text: str, *, name: str | None = None, default: Any = None, convert: Any = None) -> None:
        """Add --field, or --name, with a help text. default and convert replace those of the field."""
        if default is None:
            default = self._default_of[field]
        settings: dict[str, Any] = {"dest": field}
        if self._type_of[field] is bool:
            settings["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            settings |= {"type": convert or _converter(self._type_of[field]), "required": default is MISSING}
            if default is not MISSING and default not in (None, ()):
                settings["default"] = default
                spelled = ",".join(map(str, default)) if isinstance(default, tuple) else default
                text += f" (default: {spelled})"
        self.add_argument(f"--{name or field}", help=text.replace("%", "%%"), **settings)

    def parse(self, arguments: Sequence[str] | None, nested: Mapping[str, type] = MappingProxyType({})) -> T:
        """Parse the flags; InvalidArgumentError for an unknown flag, or a missing or wrong value.

        nested: fields that are dataclasses, filled by flags of their own.
        """
        values = vars(self.parse_args(arguments))
        for field, kind in nested.items():
            values[field] = kind(**{name: values.pop(name) for name in get_type_hints(kind) if name in values})
        is_quick = values.pop("quick", False)
        found: Any = self._make(command_line=tuple(sys.argv), **values)
        return cast(T, found.quick() if is_quick else found)

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}; `{self.prog} --help` lists the flags")


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def _converter(kind: Any) -> Any:
    """Return a converter from text to a field's type, which may be optional or a tuple."""
    parts = [part for part in get_args(kind) if part not in (type(None), Ellipsis)]
    if not parts:
        return kind
    if getattr(kind, "__origin__", None) is not tuple:
        return _converter(parts[0])

    def split(text: str) -> tuple[Any, ...]:
        try:
            return tuple(parts[0](part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {text!r}; it must be whole numbers as in 2,4") from None

    return split
