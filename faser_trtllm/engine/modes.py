"""Assign shares of a processor to engines by mode: both use all of it in turn, or each has a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from faser_trtllm.core.decision import Mode

Share = TypeVar("Share")
_Share = TypeVar("_Share", contravariant=True)


class Movable(Protocol[_Share]):
    def use(self, share: _Share, /) -> None:
        """Switch to another share from the next call on."""


class Modes(Generic[Share]):
    """Moves the engines when the mode changes. shares: returns the target's and the draft's share, made on demand."""

    def __init__(
        self,
        target: Movable[Share],
        draft: Movable[Share] | None,
        whole: Share,
        shares: Callable[[], tuple[Share, Share]],
    ) -> None:
        self._target, self._draft = target, draft
        self._whole, self._shares = whole, shares

    def enter(self, mode: Mode) -> None:
        """Switch modes. Call between two steps, when neither engine runs."""
        assert self._draft is not None, "only a drafting executor changes its mode"
        target, draft = (self._whole, self._whole) if mode is Mode.SERIAL else self._shares()
        self._target.use(target)
        self._draft.use(draft)
