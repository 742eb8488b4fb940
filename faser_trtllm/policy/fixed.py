"""The same speculative length for every request and every step, as most systems do it."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.request import Request


class FixedPolicy:
    def __init__(self, num_draft_tokens: int) -> None:
        self.name = f"fixed:{num_draft_tokens}"
        self._num_draft_tokens = num_draft_tokens

    def draft_lengths(self, decoding: Sequence[Request]) -> list[int]:
        return [self._num_draft_tokens] * len(decoding)

    def frontier_lengths(self, decoding: Sequence[Request], num_pending: Sequence[int]) -> list[int]:
        return list(num_pending)

    def observe(self, decoding: Sequence[Request], num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Nothing to learn."""
