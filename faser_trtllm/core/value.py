"""Dataclasses for the values of a step: frozen for the type checker, plain at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    T = TypeVar("T")

    @dataclass_transform(frozen_default=True)
    def value(cls: type[T]) -> type[T]:
        """Make a dataclass with slots that must not be changed once created.

        frozen=True would enforce this at run time too, but makes construction four times as expensive (it sets each
        field through object.__setattr__), and a step creates two values per request.
        """

else:
    value = dataclass(slots=True)
