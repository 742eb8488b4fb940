"""The policy interface: how many tokens to draft and how many to verify, per request and per step.

Policies take and return host numbers; they import no torch and see no tensors. Exactness rule (DESIGN section 3):
whether a row of a request exists may depend on that request's tokens up to the row's own, on other requests, and on
older steps, never on a later token of the same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faser_trtllm.core.request import Request


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def draft_lengths(self, decoding: Sequence[Request]) -> list[int]:
        """Pending drafts wanted per decoding request, before drafting; callers clamp them to Request.draft_limit."""

    def frontier_lengths(self, decoding: Sequence[Request], num_pending: Sequence[int]) -> list[int]:
        """Of num_pending[i] drafts, how many to verify in this pass (0 to num_pending[i]), after drafting."""

    def observe(self, decoding: Sequence[Request], num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        """What the pass found: drafts verified and accepted per request."""
