"""Masks: rejection sampling has the distribution of the masked target alone, and obvious shortcuts do not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from faser_trtllm.ops.accept import Outcome
from lab.reference.accept import accept_reference
from lab.reference.sample import sample_draft_reference
from tests.support.effort import pick
from tests.support.enumeration import observe
from tests.support.sampling_slots import Slots
from tests.support.toy_models import VOCAB_SIZE, total_variation

PROMPT = (0, 1)
LENGTH = 3
MAX_DRAFT_LEN = 2
_GRID = 37  # a uniform is looked at in so many places, then between those that differ
_SETS = [np.array(bits, bool) for bits in itertools.product([0, 1], repeat=VOCAB_SIZE) if any(bits)]


def branches_of(look):
    """{observation: probability} of a step function of one uniform, its steps found by bisection."""
    found: dict = {}

    def walk(low, seen_low, high, seen_high):
        if seen_low == seen_high or high - low < 1e-9:
            found[seen_low] = found.get(seen_low, 0.0) + (high - low)
            return
        middle = (low + high) / 2
        seen = look(middle)
        walk(low, seen_low, middle, seen)
        walk(middle, seen, high, seen_high)

    places = [(i + 0.5) / _GRID for i in range(_GRID)]
    seen = [look(u) for u in places]
    for i in range(_GRID - 1):
        walk(places[i], seen[i], places[i + 1], seen[i + 1])
    for end in (seen[0], seen[-1]):
        found[end] += 0.5 / _GRID
    return found


def enumerate_uniforms(run):
    """[(probability, result)] of run(uniform) over all values of the uniforms it asks for."""

    def walk(chosen):
        kind, value = observe(run, chosen)
        if kind == "result":
            return {value: 1.0}
        probs: dict = {}
        representatives: dict = {}

        def look(u):
            seen = observe(run, [*chosen, u])
            representatives.setdefault(seen, u)
            return seen

        for seen, probability in branches_of(look).items():
            for result, share in walk([*chosen, representatives[seen]]).items():
                probs[result] = probs.get(result, 0.0) + probability * share
        return probs

    return [(probability, result) for result, probability in walk([]).items()]


class GuidedEnumeration:
    """The distribution of the text under a guide that allows a set of tokens behind every two tokens.

    rule: "masked" (drafts are drawn under the mask), "unmasked" (drafts break the guide and are tested all the same),
    "dropped" (a draft that breaks the guide is dropped with those behind it, and the target draws afresh there).
    """

    def __init__(self, rule: str, seed: int, always: np.ndarray | None = None) -> None:
        """always: the tokens that are allowed everywhere, by one mask for all places; None: by a guide."""
        self.rule = rule
        rng = np.random.default_rng(seed)
        weights = rng.integers(1, 5, (2, VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE))
        self.target, self.draft = np.log(weights).astype(np.float32)
        self.guide = rng.integers(0, len(_SETS), (VOCAB_SIZE, VOCAB_SIZE))
        self.always = always
        self.slots = Slots(1, VOCAB_SIZE, MAX_DRAFT_LEN)
        self._probs: dict = {}
        self._steps: dict = {}
        self.lengths: set[int] = set()

    def allowed(self, tokens):
        return _SETS[self.guide[tokens[-2], tokens[-1]]] if self.always is None else self.always

    def masked_probs(self, logits, tokens):
        probs = np.exp(logits[tokens[-2], tokens[-1]].astype(np.float64)) * self.allowed(tokens)
        return probs / probs.sum()

    def target_probs(self):
        probs = {(): 1.0}
        for _ in range(LENGTH):
            probs = {
                (*tokens, token): probability * self.masked_probs(self.target, PROMPT + tokens)[token]
                for tokens, probability in probs.items()
                for token in range(VOCAB_SIZE)
            }
        return probs

    def probs(self, emitted=()):
        """{text of LENGTH tokens: probability}: each step drafts to the full, tests all, and carries nothing."""
        if len(emitted) >= LENGTH:
            return {emitted[:LENGTH]: 1.0}
        if emitted not in self._probs:
            probs: dict = {}
            for drafted, drafts in self._drafts(emitted, ()):
                for tested, tokens in self._test((PROMPT + emitted)[-2:], drafts):
                    for text, probability in self.probs(emitted + tokens).items():
                        probs[text] = probs.get(text, 0.0) + drafted * tested * probability
            self._probs[emitted] = probs
        return self._probs[emitted]

    def _drafts(self, emitted, drafts):
        if len(drafts) == MAX_DRAFT_LEN:
            yield 1.0, drafts
            return
        context = (PROMPT + emitted + drafts)[-2:]
        for probability, token in self._remembered("draft", context, lambda uniform: self._draft_one(context, uniform)):
            for rest, more in self._drafts(emitted, (*drafts, token)):
                yield probability * rest, more

    def _test(self, context, drafts):
        return self._remembered("test", (context, drafts), lambda uniform: self._one_pass(context, drafts, uniform))

    def _remembered(self, *key_and_run):
        *key, run = key_and_run
        if tuple(key) not in self._steps:
            self._steps[tuple(key)] = enumerate_uniforms(run)
        return self._steps[tuple(key)]

    def _masks(self, tokens, positions):
        """Masks of some positions, by position % (MAX_DRAFT_LEN + 1)."""
        if self.always is not None:
            return self.always[None]
        masks = np.zeros((MAX_DRAFT_LEN + 1, VOCAB_SIZE), bool)
        for position in positions:
            masks[position % len(masks)] = self.allowed(tokens[:position])
        return masks

    def _draft_one(self, context, uniform):
        masks = {"masks": self._masks(context, [2])} if self.rule == "masked" else {}
        self.slots.set(0, tokens=context, **masks)
        slot, known = np.zeros(1, np.int32), np.array([2], np.int32)
        logits = self.draft[context][None]
        return int(
            sample_draft_reference(self.slots.array, slot, logits, VOCAB_SIZE, known, MAX_DRAFT_LEN, uniform=uniform)[0]
        )

    def _one_pass(self, context, drafts, uniform):
        tokens = context + drafts
        fits = [bool(self.allowed(tokens[: 2 + j])[drafts[j]]) for j in range(MAX_DRAFT_LEN)]
        num_pending = MAX_DRAFT_LEN
        if self.rule == "dropped" and not all(fits):
            num_pending = fits.index(False)
        num_rows = num_pending + 1
        if self.rule == "unmasked" and self.always is None and not all(fits):
            num_rows = fits.index(False) + 1  # behind a violation there is no mask
        self.slots.set(0, tokens=tokens, masks=self._masks(tokens, range(2, 2 + num_rows)))
        for j in range(num_pending):
            q = np.exp(self.draft[tokens[j], tokens[j + 1]])
            if self.rule == "masked":
                q = q * self.allowed(tokens[: 2 + j])
            self.slots.draft_probs[0, (2 + j) % MAX_DRAFT_LEN] = q / q.sum()
        logits = np.stack([self.target[tokens[j], tokens[j + 1]] for j in range(num_rows)])
        counts = [np.array(x, np.int32) for x in ([0, num_rows], [2], [num_pending])]
        result = accept_reference(
            self.slots.array, np.zeros(1, np.int32), logits, VOCAB_SIZE, *counts, MAX_DRAFT_LEN, uniform=uniform
        )
        assert result.outcome[0] in (Outcome.RECOVERED, Outcome.BONUS)
        num_tokens = int(result.num_tokens[0])
        self.lengths.add(num_tokens)
        return tuple(result.token_ids[0, :num_tokens].tolist())


@pytest.mark.parametrize("rule", ["masked", "unmasked"])
def test_the_text_has_the_distribution_of_the_masked_target(rule):
    enumeration = GuidedEnumeration(rule, seed=1)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-6)
    assert total_variation(probs, enumeration.target_probs()) < 1e-6  # of draws in float32
    assert enumeration.lengths == {1, 2, 3}, "drafts were accepted and rejected"


@pytest.mark.parametrize("rule", ["masked", "unmasked"])
@pytest.mark.parametrize("always", pick(_SETS[1:5:3], [bits for bits in _SETS if not all(bits)]), ids=str)
def test_the_text_has_the_distribution_of_the_target_over_the_allowed_tokens(rule, always):
    """With one mask for all places, which drafts were drawn under, or, as on a GPU, were not."""
    enumeration = GuidedEnumeration(rule, seed=2, always=always)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-6)
    assert total_variation(probs, enumeration.target_probs()) < 1e-6


def test_dropping_a_draft_that_breaks_the_guide_and_drawing_afresh_is_biased():
    enumeration = GuidedEnumeration("dropped", seed=1)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-6)
    assert total_variation(probs, enumeration.target_probs()) > 0.01
