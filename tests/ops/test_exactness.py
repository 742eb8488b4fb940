"""Rejection sampling is lossless: the distribution of the emitted text, over all randomness, is the target's own.

The rules that bias the text are enumerated as well, so that these tests can fail.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.effort import pick
from tests.support.enumeration import LENGTH, PROMPT, Enumeration
from tests.support.toy_models import VOCAB_SIZE, ForeignModel, target_probs, total_variation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", pick([3], [3, 4]))
@pytest.mark.parametrize(
    "rule",
    [*pick([], ["0", "1"]), "2", "trimmed", "trimmed, all dropped", "later token", "later value", "surest first"],
)
def test_the_free_test_is_exact(rule, seed):
    """Fixed frontiers; frontiers that look at tokens up to the row's own, drafts carried or dropped; and, where drafts
    are carried, frontiers that look at all of them: rows decide when a draft is tested, never whether."""
    enumeration = Enumeration(rule, seed)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(probs, target_probs(enumeration.target, PROMPT, LENGTH)) < 1e-9


@pytest.mark.parametrize("seed", pick([3], [3, 4]))
@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("2", "certain"),
        ("trimmed", "mixed"),
        ("later value", "certain"),
        *pick(
            [],
            [
                ("0", "certain"),
                ("0", "mixed"),
                ("2", "mixed"),
                ("trimmed", "certain"),
                ("later value", "mixed"),
                ("trimmed, all dropped", "certain"),
                ("trimmed, all dropped", "mixed"),
            ],
        ),
    ],
)
def test_drafts_that_nobody_drew_are_exact(rule, source, seed):
    """Also beside drawn ones, and where the tokens before say which."""
    enumeration = Enumeration(rule, seed, source)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(probs, target_probs(enumeration.target, PROMPT, LENGTH)) < 1e-9


@pytest.mark.parametrize("rule", ["trimmed", *pick([], ["2", "later value"])])
@pytest.mark.parametrize("count", range(VOCAB_SIZE + 1))
def test_every_mixture_of_drawn_and_certain_drafts_is_exact(rule, count):
    """Certain behind any set of tokens, drawn behind the others."""
    for tokens in itertools.combinations(range(VOCAB_SIZE), count):
        enumeration = Enumeration(rule, 4, frozenset(tokens))
        probs = enumeration.probs()
        assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
        assert total_variation(probs, target_probs(enumeration.target, PROMPT, LENGTH)) < 1e-9


@pytest.mark.parametrize("rule", ["2", "trimmed", *pick([], ["0", "later value"])])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_draft_with_another_vocabulary_is_exact(rule, shift):
    """Other ids, a token that it lacks and one of its own; and through a map that is off by one."""
    enumeration = Enumeration(rule, 5, draft=ForeignModel(5, shift))
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(probs, target_probs(enumeration.target, PROMPT, LENGTH)) < 1e-9


def test_a_law_over_tokens_that_the_target_lacks_is_biased():
    """The draft's q is taken as it is, without what its other tokens had."""
    enumeration = Enumeration("2", 5, draft=ForeignModel(5, is_renormalized=False))
    assert total_variation(enumeration.probs(), target_probs(enumeration.target, PROMPT, LENGTH)) > 0.01


@pytest.mark.parametrize("rule", [*pick([], ["2"]), "trimmed"])
def test_replacing_what_was_drawn_is_biased(rule):
    enumeration = Enumeration(rule, 5, "replaced")
    assert total_variation(enumeration.probs(), target_probs(enumeration.target, PROMPT, LENGTH)) > 0.05


@pytest.mark.parametrize(
    ("rule", "bias"),
    [
        ("own probability, fresh bonus", 0.19),
        ("later token, all dropped", 0.02),
        ("later value, all dropped", 0.02),
        ("0, dropped by value", 0.01),
    ],
)
def test_known_wrong_rules_are_biased(rule, bias):
    enumeration = Enumeration(rule, 5)
    probs = enumeration.probs()
    assert sum(probs.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(probs, target_probs(enumeration.target, PROMPT, LENGTH)) > bias


def test_speculation_is_at_work():
    """Drafts are accepted, rejected and carried in the enumerated runs."""
    enumeration = Enumeration("trimmed", 3)
    enumeration.probs()
    lengths = {len(tokens) for branches in enumeration.tested.values() for _, (tokens, _) in branches}
    carried = any(left for branches in enumeration.tested.values() for _, (_, left) in branches)
    assert lengths == {1, 2, 3}
    assert carried
