"""The protocols of guided decoding between grammars and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class GuideError(Exception):
    """A guide cannot continue a request; the message is one sentence for the user."""


class GuideState(Protocol):
    """The state of one request's output in its guide. Not thread-safe: one caller at a time."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append output tokens, none of them an end id; raise GuideError if the guide does not allow one."""

    def rollback(self, num_tokens: int) -> None:
        """Remove the last num_tokens tokens. Never raises: a failed state raises when it is next used."""

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next: bit v % 32 of mask[v // 32], mask [ceil(vocab_size / 32)].

        The request's end ids are allowed where the output may end, and only there. Raises GuideError if computing the
        mask exceeds the guide's limits.
        """

    @property
    def is_complete(self) -> bool:
        """The output may end here."""


class Guide(Protocol):
    """A compiled grammar, shared by requests and threads."""

    def start(self, end_ids: Sequence[int]) -> GuideState:
        """Return the state before the first output token of a request with these end ids."""
