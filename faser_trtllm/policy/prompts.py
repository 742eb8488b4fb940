"""Statistics of the prompts that run in the same steps as decoding requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from faser_trtllm.core.decision import UNLIMITED
from faser_trtllm.core.request import Request
from faser_trtllm.policy.average import Average
from faser_trtllm.policy.base import PlanStats

PROMPT_STEPS = 64  # averaging window


def prompt_row_worth(requests: Sequence[Request]) -> float:
    """Return the output tokens that these requests may produce per row of their prompts, but at most 1: a draft's row
    yields no more. So prompts go before drafts if outputs are about as long as prompts."""
    num_output = sum(request.max_num_tokens - request.prompt_len for request in requests)
    return min(1.0, num_output / max(1, sum(request.prompt_len for request in requests)))


class Prompts:
    def __init__(self) -> None:
        self._rows = deque([0], PROMPT_STEPS)  # prompt rows in each of the last steps
        self._tokens = Average(PROMPT_STEPS)  # per step

    def observe(self, stats: PlanStats) -> None:
        steps = stats.num_steps
        self._rows.extend([stats.num_context_rows // steps] * min(steps, PROMPT_STEPS))
        self._tokens.add(stats.num_tokens / steps, steps)

    @property
    def rows_per_token(self) -> float:
        return sum(self._rows) / len(self._rows) / max(1.0, self._tokens.mean)

    def shares(self, num_tokens: float, most_rows: int = UNLIMITED) -> dict[int, float]:
        """Return the share of steps by their number of prompt rows, if steps commit num_tokens tokens.

        Prompts are assumed to run in chunks of the sizes seen: twice as many tokens bring them twice as often. Chunks
        get larger only when every step has one, up to most_rows, which a pass has room for.
        """
        with_prompts = Counter(rows for rows in self._rows if rows)
        wanted = with_prompts.total() / len(self._rows) * num_tokens / max(1.0, self._tokens.mean)
        share = min(1.0, wanted)
        found: dict[int, float] = {}
        for rows, count in with_prompts.items():
            rows = min(round(rows * wanted / share), max(rows, most_rows))
            found[rows] = found.get(rows, 0.0) + share * count / with_prompts.total()
        return found
