"""Refresh: the drafts that a pass has not tested are dropped and a new block is drawn.

The text's distribution is enumerated over all randomness, with the reference of drawing and of rejection sampling. A
refresh is lossless where nothing that was decided looked at the dropped drafts. Margins are functions of logits, so
under a product law any decision by margins qualifies; where a draft's law depends on the drafts before it, margins tell
of these, and the same refresh is biased.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from faser_trtllm.ops.accept import Outcome
from lab.reference.accept import accept_reference
from lab.reference.sample import draft_probs_row, sample_draft_reference
from tests.support.effort import pick
from tests.support.enumeration import enumerate_uniforms
from tests.support.sampling_slots import Slots
from tests.support.toy_models import total_variation

VOCAB_SIZE = 2
PROMPT = (0, 1)
LENGTH = 3
NUM_PLACES = 3
BAD_WORD = (0, 0, 1)
NUM_CELLS = 12  # every quotient and sum of the laws' sixths is a multiple of 1 / 12
SURE = 0.6  # of a draft's likeliest token


class Draft(NamedTuple):
    token: int
    probs: tuple[float, ...]  # that it was drawn from


class BlockEnumeration:
    """Blocks of NUM_PLACES drafts, drawn where nothing is pending.

    law: "product": a draft's law depends on its place and the two tokens before the block; "chain": on the draft before
    it instead; "edited": a product law of a request with a bad word, which target and draft avoid. rows: how many of
    the pending drafts have rows, by "margins" of all of them, by the "causal" ones (of the drafts up to the row's own
    test), or by the "token" of the last draft. refresh: whether untested drafts are dropped.
    """

    def __init__(self, law: str, rows: str, refresh: str, seed: int) -> None:
        self.law, self.rows, self.refresh = law, rows, refresh
        rng = np.random.default_rng(seed)
        self.target = self._table(rng)
        self.places = [self._table(rng) for _ in range(NUM_PLACES)]
        self.slots = Slots(1, VOCAB_SIZE, NUM_PLACES)
        self.num_dropped = 0
        self._probs: dict = {}
        self._steps: dict = {}

    @staticmethod
    def _table(rng):
        """Distributions in sixths by the last two tokens."""
        zeros = rng.integers(2, 5, (VOCAB_SIZE, VOCAB_SIZE))
        return np.stack([zeros, 6 - zeros], axis=-1) / 6

    def target_probs(self):
        probs = {(): 1.0}
        for _ in range(LENGTH):
            longer: dict = {}
            for tokens, probability in probs.items():
                known = PROMPT + tokens
                p = self.target[known[-2:]]
                if self.law == "edited" and known[-2:] == BAD_WORD[:2]:
                    p = np.array([1.0, 0.0])
                longer |= {(*tokens, token): probability * p[token] for token in range(VOCAB_SIZE)}
            probs = longer
        return probs

    def probs(self, emitted=(), pending=()):
        """{text of LENGTH tokens: probability} from committed tokens and pending drafts."""
        if len(emitted) >= LENGTH:
            return {emitted[:LENGTH]: 1.0}
        if (emitted, pending) not in self._probs:
            probs: dict = {}
            context = (PROMPT + emitted)[-2:]
            for drafted, drafts in [(1.0, pending)] if pending else self._block(context, ()):
                for tested, (tokens, left) in self._test(context, drafts):
                    for text, probability in self.probs(emitted + tokens, self._kept(left)).items():
                        probs[text] = probs.get(text, 0.0) + drafted * tested * probability
            self._probs[emitted, pending] = probs
        return self._probs[emitted, pending]

    def _kept(self, left):
        if left and (self.refresh == "always" or (self.refresh == "short" and len(left) < 2)):
            self.num_dropped += len(left)
            return ()
        return left

    def _block(self, context, drafts):
        if len(drafts) == NUM_PLACES:
            yield 1.0, drafts
            return
        for probability, draft in self._remembered("draft", context, drafts, self._draw):
            for rest, more in self._block(context, (*drafts, draft)):
                yield probability * rest, more

    def _test(self, context, drafts):
        return self._remembered("test", context, drafts, self._one_pass)

    def _remembered(self, name, context, drafts, step):
        key = (name, context, drafts)
        if key not in self._steps:
            self._steps[key] = list(enumerate_uniforms(lambda uniform: step(context, drafts, uniform), NUM_CELLS))
        return self._steps[key]

    def _set_slot(self, tokens):
        edits = {"bad_words": [BAD_WORD]} if self.law == "edited" else {}
        self.slots.set(0, tokens=tokens, **edits)

    def _draw(self, context, drafts, uniform):
        known = context + tuple(draft.token for draft in drafts)
        self._set_slot(known)
        probs = self.places[len(drafts)][known[-2:] if self.law == "chain" else context]
        sampling, slot, counts = self.slots.array, np.zeros(1, np.int32), np.array([len(known)], np.int32)
        logits = np.log(probs[None]).astype(np.float32)
        drawn = sample_draft_reference(sampling, slot, logits, VOCAB_SIZE, counts, NUM_PLACES, uniform=uniform)
        kept = draft_probs_row(sampling[0], len(known), VOCAB_SIZE, NUM_PLACES)
        return Draft(int(drawn[0]), tuple(kept.tolist()))

    def _one_pass(self, context, drafts, uniform):
        """(tokens committed, drafts still pending)."""
        tokens = context + tuple(draft.token for draft in drafts)
        self._set_slot(tokens)
        for place, draft in enumerate(drafts):
            draft_probs_row(self.slots.array[0], len(context) + place, VOCAB_SIZE, NUM_PLACES)[:] = draft.probs
        num_rows = self._num_verified(drafts) + 1
        logits = np.log(np.stack([self.target[tokens[place : place + 2]] for place in range(num_rows)]))
        counts = [np.array(count, np.int32) for count in ([0, num_rows], [len(context)], [len(drafts)])]
        result = accept_reference(
            self.slots.array,
            np.zeros(1, np.int32),
            logits.astype(np.float32),
            VOCAB_SIZE,
            *counts,
            NUM_PLACES,
            uniform=uniform,
        )
        count = int(result.num_tokens[0])
        left = drafts[count:] if result.outcome[0] == Outcome.STILL_PENDING else ()
        return tuple(result.token_ids[0, :count].tolist()), left

    def _num_verified(self, drafts):
        sure = [max(draft.probs) for draft in drafts]
        if self.rows == "token":
            return len(drafts) if drafts[-1].token else 0
        if self.rows == "causal":  # a row needs its own draft and the ones before to be as sure as this
            return next((place for place, chance in enumerate(sure[1:]) if chance < SURE), len(drafts) - 1)
        return len(drafts) if sure[-1] > SURE else 0


def _bias(law, rows, refresh, seed):
    """Total variation from the target's text, and drafts dropped."""
    enumeration = BlockEnumeration(law, rows, refresh, seed)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
    return total_variation(probs, enumeration.target_probs()), enumeration.num_dropped


SEEDS = pick([3], [3, 5])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("refresh", ["always", "short"])
@pytest.mark.parametrize("rows", ["margins", "causal"])
def test_under_a_product_law_a_refresh_is_exact(rows, refresh, seed):
    bias, num_dropped = _bias("product", rows, refresh, seed)
    assert bias < 1e-9
    assert num_dropped


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows", ["margins", *pick([], ["causal"]), "token"])
@pytest.mark.parametrize("law", ["product", "chain", "edited"])
def test_carried_drafts_are_exact_under_every_law(law, rows, seed):
    bias, num_dropped = _bias(law, rows, "never", seed)
    assert bias < 1e-9
    assert not num_dropped


@pytest.mark.parametrize(("law", "seed"), [("chain", 1), ("chain", 4), ("edited", 3), ("edited", 5)])
def test_where_a_law_depends_on_drafts_a_refresh_after_margins_is_biased(law, seed):
    """An edit by the text makes a chain law of a product law."""
    assert _bias(law, "margins", "always", seed)[0] > 0.05


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("law", ["chain", "edited"])
def test_a_cut_that_saw_no_dropped_draft_is_exact(law, seed):
    bias, num_dropped = _bias(law, "causal", "always", seed)
    assert bias < 1e-9
    assert num_dropped


@pytest.mark.parametrize("law", ["product", "chain", "edited"])
def test_a_refresh_after_a_look_at_a_dropped_token_is_biased(law):
    assert _bias(law, "token", "always", 3)[0] > 0.05
