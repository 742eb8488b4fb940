"""Branches beside a chain of drafts are lossless: a row behind a token that the chain's test has committed may be run
early. What else one might do with a branch is biased, which is enumerated too."""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm.ops.accept import Outcome
from lab.reference.accept import accept_reference
from tests.support.effort import pick
from tests.support.enumeration import LENGTH, MAX_DRAFT_LEN, PROMPT, Enumeration
from tests.support.toy_models import VOCAB_SIZE, target_probs, total_variation


class TreeEnumeration(Enumeration):
    """Every draft has a branch beside it, the draft model's runner-up. use: what happens where a draft is rejected."""

    def __init__(self, rule: str, use: str, seed: int) -> None:
        super().__init__(rule, seed)
        self.use = use
        self.num_followed = 0

    def _one_pass(self, context, drafts, certain, uniform):
        tokens, left = super()._one_pass(context, drafts, certain, uniform)
        place = len(tokens) - 1
        if place >= len(drafts) or tokens[:place] != drafts[:place] or tokens[place] == drafts[place]:
            return tokens, left  # nothing was rejected
        before = context + tokens[:place]
        runner_up = self._runner_up(before, drafts[place])
        if self.use == "taken" and self.target.probs(before)[runner_up] > 0:  # whatever was recovered
            tokens = (*tokens[:place], runner_up)
        if tokens[place] != runner_up:
            return tokens, left
        self.num_followed += 1
        row = (*before, drafts[place]) if self.use == "row of the draft" else context + tokens
        return tokens + self._row_behind(context + tokens, row, uniform), left

    def _runner_up(self, known, draft):
        """A function of the tokens before and of the draft."""
        return max((v for v in range(VOCAB_SIZE) if v != draft), key=lambda v: self.draft.probs(known)[v])

    def _row_behind(self, known, row, uniform):
        self.slots.set(0, tokens=known)
        counts = (np.array(count, np.int32) for count in ([0, 1], [len(known)], [0]))
        result = accept_reference(
            self.slots.array,
            np.zeros(1, np.int32),
            self.target.logits(row)[None],
            VOCAB_SIZE,
            *counts,
            MAX_DRAFT_LEN,
            uniform=uniform,
        )
        assert result.outcome[0] == Outcome.BONUS
        return (int(result.token_ids[0, 0]),)


def bias(enumeration):
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
    assert enumeration.num_followed > 0
    return total_variation(probs, target_probs(enumeration.target, PROMPT, LENGTH))


@pytest.mark.parametrize("seed", pick([3], [3, 4, 5]))
@pytest.mark.parametrize("rule", [*pick([], ["1", "2"]), "trimmed", "later value", "surest first"])
def test_a_row_behind_a_committed_token_may_run_early(rule, seed):
    assert bias(TreeEnumeration(rule, "followed", seed)) < 1e-9


@pytest.mark.parametrize(
    ("rule", "use"),
    [
        ("trimmed", "taken"),
        ("trimmed", "row of the draft"),
        *pick([], [("2", "taken"), ("2", "row of the draft")]),
    ],
)
def test_other_uses_of_a_branch_are_biased(rule, use):
    assert bias(TreeEnumeration(rule, use, 5)) > 0.01
