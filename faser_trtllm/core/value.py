"""The values that a step makes: frozen for the type checker, plain at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    T = TypeVar("T")

    @dataclass_transform(frozen_default=True)
    def value(cls: type[T]) -> type[T]:
        """A dataclass with slots that nobody may change once it is made.

        frozen=True would see to that at run time too, at four times the cost of making one: it sets each field through
        object.__setattr__, and a step makes two values per request.
        """

else:
    value = dataclass(slots=True)
