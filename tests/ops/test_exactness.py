"""The free test is lossless: the law of the emitted text, over all randomness, is the target's own.

The reference implementation runs as it is; only its source of uniforms is replaced, by one that walks through
all of them. The rules that bias the text are enumerated as well, so that these tests can fail.
"""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm.ops.accept import Outcome, accept_reference
from faser_trtllm.ops.sample import sample_draft_reference
from tests.ops.sampling_slots import Slots
from tests.ops.toy_models import CELLS, VOCAB_SIZE, ToyModel, target_law, total_variation

PROMPT = (0, 1)
LENGTH = 3
MAX_DRAFT_LEN = 2


class _NeedUniformError(Exception):
    pass


def enumerate_uniforms(run):
    """(probability, result) of run(uniform) over all values of the uniforms it asks for.

    Values after which run() asks for the same next number, or ends alike, are one branch.
    """

    def walk(chosen, probability):
        branches = {}
        for cell in range(CELLS):
            observed = observe([*chosen, (cell + 0.5) / CELLS])
            branches.setdefault(observed, []).append((cell + 0.5) / CELLS)
        for (kind, value), cells in branches.items():
            weight = probability * len(cells) / CELLS
            if kind == "result":
                yield weight, value
            else:
                yield from walk([*chosen, cells[0]], weight)

    def observe(values):
        queue = list(values)

        def uniform(key, index, stream):
            if not queue:
                raise _NeedUniformError(index, stream)
            return queue.pop(0)

        try:
            return "result", run(uniform)
        except _NeedUniformError as need:
            return "next", need.args

    kind, value = observe([])
    if kind == "result":
        yield 1.0, value
    else:
        yield from walk([], 1.0)


class Enumeration:
    """The law of the text when frontiers are cut by `rule`; what a state leads to is remembered."""

    def __init__(self, rule: str, seed: int) -> None:
        self.rule = rule
        self.target, self.draft = ToyModel(seed), ToyModel(seed + 1000)
        self.slots = Slots(1, VOCAB_SIZE, MAX_DRAFT_LEN)
        self._laws: dict = {}
        self._drafted: dict = {}
        self._tested: dict = {}

    def law(self, emitted=(), pending=()):
        """{text of LENGTH tokens: probability} from a state: committed tokens and carried drafts."""
        if len(emitted) >= LENGTH:
            return {emitted[:LENGTH]: 1.0}
        if (emitted, pending) not in self._laws:
            law: dict = {}
            for drafted, drafts in self._draft_to_full(emitted, pending):
                for tested, (tokens, left) in self._test(emitted, drafts):
                    for text, probability in self.law(emitted + tokens, left).items():
                        law[text] = law.get(text, 0.0) + drafted * tested * probability
            self._laws[emitted, pending] = law
        return self._laws[emitted, pending]

    def _draft_to_full(self, emitted, pending):
        if len(pending) == MAX_DRAFT_LEN:
            yield 1.0, pending
            return
        for probability, token in self._draft_one(PROMPT + emitted + pending):
            for rest, drafts in self._draft_to_full(emitted, (*pending, token)):
                yield probability * rest, drafts

    def _draft_one(self, known):
        context = known[-2:]
        if context not in self._drafted:

            def run(uniform):
                self.slots.set(0, tokens=context)
                return int(
                    sample_draft_reference(
                        self.slots.array,
                        np.zeros(1, np.int32),
                        self.draft.logits(context)[None],
                        VOCAB_SIZE,
                        np.array([len(context)], np.int32),
                        MAX_DRAFT_LEN,
                        uniform=uniform,
                    )[0]
                )

            self._drafted[context] = list(enumerate_uniforms(run))
        return self._drafted[context]

    def _test(self, emitted, drafts):
        known = PROMPT + emitted
        state = (known[-2:], drafts)
        if state not in self._tested:
            self._tested[state] = list(enumerate_uniforms(lambda uniform: self._one_pass(*state, uniform)))
        return self._tested[state]

    def _one_pass(self, context, drafts, uniform):
        """(tokens committed, drafts still pending) of one pass over the rows that the rule leaves."""
        num_verified, num_pending = self._frontier(context, drafts)
        self.slots.set(0, tokens=context + drafts)
        for j in range(num_pending):
            position = len(context) + j
            self.slots.draft_probs[0, position % MAX_DRAFT_LEN] = self.draft.law((context + drafts)[:position])
        logits = np.stack([self.target.logits((context + drafts)[: len(context) + j]) for j in range(num_verified + 1)])
        result = accept_reference(
            self.slots.array,
            np.zeros(1, np.int32),
            logits,
            VOCAB_SIZE,
            np.array([0, num_verified + 1], np.int32),
            np.array([len(context)], np.int32),
            np.array([num_pending], np.int32),
            MAX_DRAFT_LEN,
            uniform=uniform,
        )
        num_tokens = int(result.num_tokens[0])
        tokens = tuple(result.token_ids[0, :num_tokens].tolist())
        carried = result.outcome[0] == Outcome.CARRIED and "dropped" not in self.rule
        return tokens, drafts[num_tokens:] if carried else ()

    def _frontier(self, context, drafts):
        """Drafts to verify, and drafts that the test is told of."""
        own = [float(self.draft.law((context + drafts)[: len(context) + j])[drafts[j]]) for j in range(2)]
        first, both = own[0], own[0] * own[1]
        trimmed = 0 if first <= 0.4 else 1 if both <= 0.3 else 2
        if self.rule in ("trimmed", "trimmed, dropped"):
            return trimmed, MAX_DRAFT_LEN
        if self.rule == "own probability, fresh bonus":
            return trimmed, trimmed
        if self.rule == "later token, dropped":
            return (2 if both > 0.3 else 0), MAX_DRAFT_LEN
        return int(self.rule), MAX_DRAFT_LEN


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("rule", ["0", "1", "2", "trimmed", "trimmed, dropped"])
def test_the_free_test_is_exact(rule, seed):
    """Fixed frontiers, frontiers that look at tokens up to the row's own, drafts carried or dropped."""
    enumeration = Enumeration(rule, seed)
    law = enumeration.law()
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(law, target_law(enumeration.target, PROMPT, LENGTH)) < 1e-9


@pytest.mark.parametrize(("rule", "bias"), [("own probability, fresh bonus", 0.19), ("later token, dropped", 0.02)])
def test_known_wrong_rules_are_biased(rule, bias):
    enumeration = Enumeration(rule, 5)
    law = enumeration.law()
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(law, target_law(enumeration.target, PROMPT, LENGTH)) > bias


def test_speculation_is_at_work():
    """Drafts are accepted, rejected and carried in the enumerated runs."""
    enumeration = Enumeration("trimmed", 3)
    enumeration.law()
    lengths = {len(tokens) for branches in enumeration._tested.values() for _, (tokens, _) in branches}
    carried = any(left for branches in enumeration._tested.values() for _, (_, left) in branches)
    assert lengths == {1, 2, 3}
    assert carried
