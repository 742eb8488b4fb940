"""Margins and candidates that drawing a draft leaves behind: native against the reference, and by hand."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from lab.reference.sample import sample_draft, sample_draft_reference
from tests.support.effort import examples
from tests.support.sampling_slots import Slots

PATHS = [sample_draft, sample_draft_reference]
CAPACITY = 64
UNTOUCHED = -9


class Confident(Slots):
    """Slots with memory for margins and candidates."""

    def __init__(self, num_slots, vocab_size, max_draft_len):
        self.margins = np.full((num_slots, CAPACITY), UNTOUCHED, np.float32)
        self.candidates = np.full((num_slots, CAPACITY, NUM_CANDIDATES), UNTOUCHED, np.int32)
        super().__init__(num_slots, vocab_size, max_draft_len, CAPACITY)

    def set(self, slot, **fields):
        fields = {"draft_margins": self.margins[slot].ctypes.data} | fields
        super().set(slot, **{"draft_candidates": self.candidates[slot].ctypes.data} | fields)


def draw(path, logits, num_known=3, **fields):
    """The token, its margin and its candidates."""
    slots = Confident(1, len(logits), 4)
    slots.set(0, **fields)
    rows = np.array([logits], np.float32)
    tokens = path(slots.array, np.zeros(1, np.int32), rows, len(logits), np.array([num_known], np.int32), 4)
    others = np.arange(CAPACITY) != num_known
    assert (slots.margins[0, others] == UNTOUCHED).all()
    assert (slots.candidates[0, others] == UNTOUCHED).all()
    return int(tokens[0]), float(slots.margins[0, num_known]), slots.candidates[0, num_known].tolist()


@pytest.mark.parametrize("path", PATHS)
def test_by_hand(path):
    logits = [0, 3, -1, 5, 3, -2, 1, 0.5, -3, 4.25]
    assert draw(path, logits, mode=native.GREEDY) == (3, 0.75, [3, 9, 1, 4, 6, 7, 0, 2])
    # Edits count, temperature does not.
    token, margin, best = draw(path, logits, mode=native.GREEDY, bias=[(9, 2.0)], temperature=0.1)
    assert (token, margin, best[:2]) == (9, 1.25, [9, 3])
    assert draw(path, logits, mode=native.GREEDY, bad_words=[(3,)])[1] == 1.25
    # A tie has no margin; the lower id leads.
    assert draw(path, [1, 7, 7, 7], mode=native.GREEDY) == (1, 0.0, [1, 2, 3, 0, -1, -1, -1, -1])


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_is_no_candidate_and_margins_are_bounded(path):
    inf = float("inf")
    assert draw(path, [-inf, 2, -inf], mode=native.GREEDY) == (1, 1e4, [1] + [-1] * 7)
    assert draw(path, [5], mode=native.GREEDY) == (0, 1e4, [0] + [-1] * 7)
    assert draw(path, [3e38, -3e38], mode=native.GREEDY)[1] == 1e4


@pytest.mark.parametrize("path", PATHS)
def test_a_draft_outside_the_candidates_is_put_last(path):
    """A flat distribution over 200 tokens draws most drafts from beyond the eight best."""
    logits = np.linspace(0.01, 0, 200)
    num_outside = 0
    for seed in range(30):
        token, margin, candidates = draw(path, logits, mode=native.SEEDED, key=seed)
        assert 0 < margin < 1e4
        assert candidates[:7] == list(range(7))
        assert candidates[7] == (7 if token < 8 else token)
        num_outside += token >= 8
    assert num_outside > 20


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_with_a_seed_the_margin_is_what_the_draft_s_logit_can_lose(path, temperature):
    """Draft and target draw with the same noise: what counts is how far ahead the winner is."""
    logits = np.random.default_rng(1).standard_normal(90).astype(np.float32)
    margins = []
    for seed in range(20):
        fields = {"mode": native.SEEDED, "key": seed, "temperature": temperature}
        token, margin, _ = draw(path, logits, **fields)
        margins.append(margin)
        for share, is_same in ((0.999, True), (1.001, False)):
            weaker = logits.astype(np.float64)
            weaker[token] -= share * margin
            assert (draw(path, weaker.astype(np.float32), **fields)[0] == token) == is_same
    assert max(margins) > 5 * min(margins)


@pytest.mark.parametrize("path", PATHS)
def test_with_a_seed_what_top_k_leaves_out_does_not_run(path):
    logits = [0, 3, -1, 5, 3, -2, 1, 0.5, -3, 4.25]
    assert draw(path, logits, mode=native.SEEDED, key=5, top_k=1)[:2] == (3, 1e4)
    assert draw(path, logits, mode=native.SEEDED, key=5, top_k=2)[1] < 1e4
    assert draw(path, [2], mode=native.SEEDED, key=5)[:2] == (0, 1e4)


@pytest.mark.parametrize("path", PATHS)
def test_a_row_without_a_distribution_leaves_nothing(path):
    assert draw(path, [float("nan"), 1, 2], mode=native.GREEDY) == (-1, UNTOUCHED, [UNTOUCHED] * 8)
    assert draw(path, [1, 2], mode=native.GREEDY, bad_words=[(0,), (1,)]) == (-1, UNTOUCHED, [UNTOUCHED] * 8)


def test_memory_is_optional():
    slots = Confident(1, 20, 4)
    rows = np.random.default_rng(0).standard_normal((1, 20)).astype(np.float32)
    arguments = np.zeros(1, np.int32), rows, 20, np.array([2], np.int32), 4
    slots.set(0, mode=native.GREEDY)
    wanted = sample_draft(slots.array, *arguments)
    for missing in ({"draft_margins": 0}, {"draft_candidates": 0}, {"draft_margins": 0, "draft_candidates": 0}):
        slots.margins[:], slots.candidates[:] = UNTOUCHED, UNTOUCHED
        slots.set(0, mode=native.GREEDY, **missing)
        assert sample_draft(slots.array, *arguments) == wanted
        assert (slots.margins[0, 2] == UNTOUCHED) == ("draft_margins" in missing)
        assert (slots.candidates[0, 2, 0] == UNTOUCHED) == ("draft_candidates" in missing)


@settings(max_examples=examples(150))
@given(st.data())
def test_native_is_the_reference(data):
    """Around the sizes of vectors and blocks, with ties, bans and infinities."""
    size = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 1000])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = (rng.standard_normal(size) * 3).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)
    if data.draw(st.booleans()):
        logits[rng.random(size) < 0.7] = -np.inf
    fields = {
        "mode": data.draw(st.sampled_from([native.GREEDY, native.SEEDED, native.SAMPLED])),
        "key": data.draw(st.integers(0, 2**64 - 1)),
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 5.0])),
        "bad_words": data.draw(st.lists(st.tuples(st.integers(0, size - 1)), max_size=3)),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.5])),
    }
    token, margin, candidates = draw(sample_draft, logits, **fields)
    wanted_token, wanted_margin, wanted_candidates = draw(sample_draft_reference, logits, **fields)
    assert (token, candidates) == (wanted_token, wanted_candidates)
    # Two logarithms may differ in their last bits, which shows where two tokens are close.
    assert margin == pytest.approx(wanted_margin, rel=1e-5, abs=1e-9 if fields["mode"] == native.SEEDED else 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [native.GREEDY, native.SEEDED, native.SAMPLED])
def test_the_runner_up_is_what_would_have_been_drafted_instead(path, mode):
    """Greedily and with a seed: what is drafted with the draft's own token banned."""
    rng = np.random.default_rng(5)
    for key in range(20):
        logits = rng.standard_normal(30)
        runner_up = np.full(CAPACITY, UNTOUCHED, np.int32)
        fields = {"mode": mode, "key": key, "temperature": 1.5, "draft_runners_up": runner_up.ctypes.data}
        token, _, candidates = draw(path, logits, **fields)
        if mode == native.SAMPLED:
            wanted = next(c for c in candidates if c != token)
        else:
            wanted = draw(path, logits, **fields | {"draft_runners_up": 0}, bad_words=[(token,)])[0]
        assert runner_up[3] == wanted
        assert (np.delete(runner_up, 3) == UNTOUCHED).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [native.GREEDY, native.SEEDED, native.SAMPLED])
def test_the_only_token_has_no_runner_up(path, mode):
    runner_up = np.full(CAPACITY, UNTOUCHED, np.int32)
    for logits in ([5], [-np.inf, 1, -np.inf]):
        draw(path, logits, mode=mode, draft_runners_up=runner_up.ctypes.data)
        assert runner_up[3] == -1
