"""Traffic of two streams to one memory, and how much it slows each of them while both run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Of the share of the bandwidth that the other stream draws: a loaded memory answers later, long before it is full.
# Fitted to 20 splits of an H100 (2026-11-26); a draft step's small kernels wait for every answer, a pass hides half.
DRAFT_WAITS = 0.55
VERIFY_WAITS = 0.3


@dataclass(frozen=True)
class Work:
    """A stream's work, alone on its partition: ms, and the GB it moves."""

    ms: float
    gb: float


@dataclass(frozen=True)
class Traffic:
    """Bytes of passes and bandwidths of partitions.

    gb, gb_per_token: by role ("target", "draft"), of one pass, and of one request's one token of context.
    gb_per_ms: by partition, all that passes on it can draw.
    """

    gb: Mapping[str, float]
    gb_per_token: Mapping[str, float]
    gb_per_ms: Mapping[str, float]

    def of_pass(self, role: str, num_requests: int, context_len: float) -> float:
        """GB of one pass."""
        return self.gb[role] + self.gb_per_token[role] * num_requests * context_len

    def slowdowns(self, draft: Work, draft_partition: str, verify: Work, verify_partition: str) -> tuple[float, float]:
        """How many times longer draft and verify take while both run, by the share of the memory's bandwidth ("all")
        that the other draws when it is alone on its partition."""
        if draft.ms <= 0.0 or verify.ms <= 0.0:
            return 1.0, 1.0
        of_draft, of_verify = self._drawn(draft, draft_partition), self._drawn(verify, verify_partition)
        slower = 1.0 / (1.0 - DRAFT_WAITS * of_verify), 1.0 / (1.0 - VERIFY_WAITS * of_draft)
        full = max(1.0, of_draft / slower[0] + of_verify / slower[1])  # both together draw no more than there is
        return full * slower[0], full * slower[1]

    def _drawn(self, stream: Work, partition: str) -> float:
        """The share of the memory's bandwidth, at most what the partition can draw."""
        return min(stream.gb / stream.ms, self.gb_per_ms[partition]) / self.gb_per_ms["all"]


def side_by_side(first_ms: float, second_ms: float, slowdowns: tuple[float, float]) -> tuple[float, float]:
    """When two streams end that start together and are alone after the other's end -> ms of each."""
    first, second = slowdowns[0] * first_ms, slowdowns[1] * second_ms
    if first <= second:
        return first, first + (1.0 - (first / second if second else 0.0)) * second_ms
    return second + (1.0 - second / first) * first_ms, second
