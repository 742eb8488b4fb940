"""What two lanes draw from one memory, and how much that slows each of them while both run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FAIR_SHARE = 0.95  # of the bandwidth, up to which two lanes do not wait for each other
SHARED_CACHE = 1.03  # memory times while both run: they evict each other's lines (assumed)
MEMORY_BOUND = 0.75  # of the bandwidth: what passes reach that do nothing but wait for memory
OVERLAP_POWER = 4.0  # a pass takes (memory^4 + compute^4)^(1/4): nearly the longer of the two


@dataclass(frozen=True)
class Lane:
    """A lane's work, alone on its partition: ms, and the GB it moves."""

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

    def slowdowns(self, draft: Lane, draft_partition: str, verify: Lane, verify_partition: str) -> tuple[float, float]:
        """How many times longer draft and verify take while both run: what they want together beyond FAIR_SHARE of the
        memory's bandwidth ("all") is shared in proportion, and only the memory's part of a lane waits for it."""
        if draft.ms <= 0.0 or verify.ms <= 0.0:
            return 1.0, 1.0
        wanted = (draft.gb / draft.ms + verify.gb / verify.ms) / self.gb_per_ms["all"]
        longer = SHARED_CACHE * max(1.0, wanted / FAIR_SHARE)
        return (
            _slowdown(draft.gb / draft.ms / self.gb_per_ms[draft_partition], longer),
            _slowdown(verify.gb / verify.ms / self.gb_per_ms[verify_partition], longer),
        )


def _slowdown(drawn: float, longer: float) -> float:
    """Of a pass that draws such a share of its bandwidth, if memory times are so much longer."""
    share = min(1.0, drawn / MEMORY_BOUND) ** OVERLAP_POWER
    slower: float = (1.0 + share * (longer**OVERLAP_POWER - 1.0)) ** (1.0 / OVERLAP_POWER)
    return slower


def side_by_side(first_ms: float, second_ms: float, slowdowns: tuple[float, float]) -> tuple[float, float]:
    """When two lanes end that start together and are alone after the other's end -> ms of each."""
    first, second = slowdowns[0] * first_ms, slowdowns[1] * second_ms
    if first <= second:
        return first, first + (1.0 - (first / second if second else 0.0)) * second_ms
    return second + (1.0 - second / first) * first_ms, second
