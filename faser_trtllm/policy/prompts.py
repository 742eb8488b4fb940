"""The prompts that steps run beside their decoding requests: requests end, and others begin."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from faser_trtllm.core.request import Request
from faser_trtllm.policy.average import Average
from faser_trtllm.policy.base import PlanStats

PROMPT_STEPS = 64  # over which is averaged how many steps run prompts, and rows of them


def prompt_row_worth(requests: Sequence[Request]) -> float:
    """Output tokens that a row of a prompt leads to: at most as many as its request may still ask for, and one, which
    is what a draft's row brings at most. So prompts go first where outputs are about as long."""
    num_output = sum(request.max_num_tokens - request.prompt_len for request in requests)
    return min(1.0, num_output / max(1, sum(request.prompt_len for request in requests)))


class Prompts:
    def __init__(self) -> None:
        self._rows = deque([0], PROMPT_STEPS)  # of prompts, in each of the last steps
        self._tokens = Average(PROMPT_STEPS)  # per step

    def observe(self, stats: PlanStats) -> None:
        steps = stats.num_steps
        self._rows.extend([stats.num_context_rows // steps] * min(steps, PROMPT_STEPS))
        self._tokens.add(stats.num_tokens / steps, steps)

    @property
    def rows_per_token(self) -> float:
        return sum(self._rows) / len(self._rows) / max(1.0, self._tokens.mean)

    def shares(self, num_tokens: float) -> dict[int, float]:
        """By rows of prompts the share of the steps that run so many, if steps commit so many tokens.

        Prompts come in pieces as large as before: twice the tokens bring them twice as often, and larger ones only
        where every step has some.
        """
        with_prompts = Counter(rows for rows in self._rows if rows)
        wanted = with_prompts.total() / len(self._rows) * num_tokens / max(1.0, self._tokens.mean)
        share = min(1.0, wanted)
        found: dict[int, float] = {}
        for rows, count in with_prompts.items():
            rows = round(rows * wanted / share)
            found[rows] = found.get(rows, 0.0) + share * count / with_prompts.total()
        return found
