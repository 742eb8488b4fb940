"""No speculation: never draft, and use up what is still pending."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.request import Request


class OffPolicy:
    name = "off"

    def draft_lengths(self, decoding: Sequence[Request]) -> list[int]:
        return [0] * len(decoding)

    def frontier_lengths(self, decoding: Sequence[Request], num_pending: Sequence[int]) -> list[int]:
        return list(num_pending)

    def observe(self, decoding: Sequence[Request], num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Nothing to learn."""
