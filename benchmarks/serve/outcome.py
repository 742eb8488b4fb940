"""The outcome of one request as seen by its client."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.serve.acceptance import Acceptance


@dataclass
class Outcome:
    """The outcome of a request. Times are in seconds on the run's clock.

    due_s: when it should have been sent. chunk_s: arrival of each piece of the answer.
    num_tokens, num_prompt_tokens: the server's counts, None if it has none.
    error: the reason of a failure. acceptance: the server's record of the request's speculation.
    is_synthetic: the server reports synthetic_acceptance.
    """

    due_s: float
    category: str = "all"
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    error: str | None = None
    acceptance: Acceptance | None = None
    is_synthetic: bool = False

    @property
    def late_s(self) -> float:
        """Delay of the request by the bench itself, because it was slow or at its max_concurrency."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token since due_s, so that a late bench does not make the server look better."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens, or an unknown number."""
        if not self.chunk_s or self.num_tokens is None or self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    def gaps_s(self) -> list[float]:
        """Gaps between consecutive pieces."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]
