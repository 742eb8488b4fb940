"""The prompts that steps run beside their decoding requests: requests end, and others begin."""

from __future__ import annotations

from collections import Counter, deque

from faser_trtllm.policy.base import PlanStats
from faser_trtllm.policy.costs import Average

PROMPT_STEPS = 64  # over which is averaged how many steps run prompts, and rows of them


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
