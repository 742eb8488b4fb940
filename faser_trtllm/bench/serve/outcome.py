"""The outcome of one request as seen by its client."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Ending(str, Enum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # by the bench
    FAILED = "failed"


@dataclass
class Outcome:
    """Times are in seconds on the run's clock.

    due_s: when it should have been sent, sent_s: when it was. chunk_s: arrival of each response with tokens, and
    chunk_tokens: how many it brought. token_ids: the output. num_draft_tokens, num_accepted_tokens: as reported by the
    service, or None. is_synthetic: the service reports that the output is not the target's.
    """

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ending: Ending = Ending.FAILED
    finish_reason: str | None = None
    error: str | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    is_synthetic: bool = False

    def add_chunk(self, now_s: float, token_ids: list[int]) -> None:
        """Record a response; one without tokens (an empty last one) is not a chunk."""
        if token_ids:
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(len(token_ids))
            self.token_ids += token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def late_s(self) -> float:
        """How late the bench itself sent the request."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float | None:
        """Measured from the due time: a late bench must not make the service look better."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    def gaps_s(self) -> list[float]:
        """Gaps between consecutive responses, which a reader sees as stutter."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]
