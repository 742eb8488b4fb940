"""Memory traffic of two concurrent streams, and how much it slows each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Slowdown per share of the bandwidth that the other stream uses: latency rises long before the memory is saturated.
# Fitted to 20 splits of an H100 (2026-11-26); a draft step's small kernels wait for every access, a pass hides half.
DRAFT_WAITS = 0.55
VERIFY_WAITS = 0.3


@dataclass(frozen=True)
class Work:
    """A stream's work when it runs alone on its partition."""

    ms: float
    gb: float


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of passes, and bandwidths of partitions."""

    gb: Mapping[str, float]  # of one pass, by role ("target", "draft")
    gb_per_token: Mapping[str, float]  # by role, for each request and token of context
    gb_per_ms: Mapping[str, float]  # bandwidth by partition

    @staticmethod
    def of(data: Mapping[str, Any] | None) -> Traffic | None:
        """Return the traffic in CostTable.traffic."""
        return None if data is None else Traffic(**data)

    def of_pass(self, role: str, num_requests: int, context_len: float) -> float:
        """Return the GB that one pass moves."""
        return self.gb[role] + self.gb_per_token[role] * num_requests * context_len

    def slowdowns(self, draft: Work, draft_partition: str, verify: Work, verify_partition: str) -> tuple[float, float]:
        """Return the factors by which draft and verify slow down while both run, from the share of the whole bandwidth
        ("all") that the other one uses when it is alone on its partition."""
        if draft.ms <= 0.0 or verify.ms <= 0.0:
            return 1.0, 1.0
        of_draft, of_verify = self._drawn(draft, draft_partition), self._drawn(verify, verify_partition)
        slower = 1.0 / (1.0 - DRAFT_WAITS * of_verify), 1.0 / (1.0 - VERIFY_WAITS * of_draft)
        full = max(1.0, of_draft / slower[0] + of_verify / slower[1])  # together they use at most the whole bandwidth
        return full * slower[0], full * slower[1]

    def _drawn(self, stream: Work, partition: str) -> float:
        """Return the share of the whole bandwidth that a stream uses, limited by its partition."""
        return min(stream.gb / stream.ms, self.gb_per_ms[partition]) / self.gb_per_ms["all"]


def side_by_side(first_ms: float, second_ms: float, slowdowns: tuple[float, float]) -> tuple[float, float]:
    """Return the ms after which two streams end that start together; after the first end, the other runs alone."""
    first, second = slowdowns[0] * first_ms, slowdowns[1] * second_ms
    if first <= second:
        return first, first + (1.0 - (first / second if second else 0.0)) * second_ms
    return second + (1.0 - second / first) * first_ms, second
