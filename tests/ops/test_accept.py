"""Rejection sampling, native: the reference's decisions, and the target's distribution by chi-square."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.stats import chisquare

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.accept import Outcome, RowStatus, accept
from lab.reference.accept import accept_reference
from lab.reference.sample import sample_draft, sample_draft_reference
from tests.support.effort import examples
from tests.support.emission import KEY_STEP, check_toy_texts, emit, toy_logits, up_to_token_0
from tests.support.sampling_slots import Slots
from tests.support.toy_models import VOCAB_SIZE, ToyModel

MODES = (native.GREEDY, native.SEEDED, native.SAMPLED)


def int32(*values):
    return np.array(values, np.int32)


@st.composite
def rounds(draw):
    """A batch: per request a mode, edits, committed tokens, pending drafts, and drafts to verify."""
    max_draft_len = draw(st.integers(1, 4))
    vocab_size = draw(st.sampled_from([2, 5, 33, 200]))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        num_drafts = draw(st.integers(0, max_draft_len))
        fields = {
            "mode": draw(st.sampled_from(MODES)),
            "key": draw(st.integers(0, 2**64 - 1)),
            "temperature": draw(st.sampled_from([0.5, 1.0, 2.0])),
            "top_k": draw(st.sampled_from([0, 3])),
            "top_p": draw(st.sampled_from([1.0, 0.8])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
            "bad_words": draw(st.sampled_from([[], [[1]], [[0, 1]]])),
        }
        certain = draw(st.lists(st.booleans(), min_size=max_draft_len, max_size=max_draft_len))
        requests.append((fields, draw(st.integers(1, 9)), num_drafts, certain, draw(st.integers(-1, num_drafts))))
    return max_draft_len, vocab_size, requests, draw(st.integers(0, 2**32))


@settings(max_examples=examples(200), derandomize=True)
@given(rounds())
def test_native_is_the_reference(case):
    max_draft_len, vocab_size, requests, seed = case
    rng = np.random.default_rng(seed)
    num_slots = len(requests) + 2
    order = rng.permutation(num_slots)[: len(requests)].astype(np.int32)
    history = rng.integers(0, vocab_size, (num_slots, 64))
    num_tokens = int32(*(r[1] for r in requests))
    num_drafts = int32(*(r[2] for r in requests))
    num_rows = [verified + 1 for *_, verified in requests]
    cu_rows = np.cumsum([0, *num_rows]).astype(np.int32)
    target_logits = rng.standard_normal((cu_rows[-1], vocab_size + 3)).astype(np.float32) * 2
    draft_logits = rng.standard_normal((max_draft_len, len(requests), vocab_size)).astype(np.float32) * 2
    for i, verified in enumerate(num_rows):  # drafts that resemble the target, so that some are accepted
        for j in range(min(verified, max_draft_len)):
            draft_logits[j, i] = 0.3 * draft_logits[j, i] + target_logits[cu_rows[i] + j, :vocab_size]

    outcomes = []
    for draft, test in ((sample_draft, accept), (sample_draft_reference, accept_reference)):
        slots = Slots(num_slots, vocab_size, max_draft_len)
        for slot, (fields, known, *_) in zip(order, requests, strict=True):
            slots.set(slot, tokens=history[slot, :known], prompt_len=known, **fields)
        for j in range(max_draft_len):
            drafting = [i for i, drafts in enumerate(num_drafts) if drafts > j]
            logits = np.ascontiguousarray(draft_logits[j, drafting])
            known = num_tokens[drafting] + np.int32(j)
            draft(slots.array, order[drafting], logits, vocab_size, known, max_draft_len)
            for i in drafting:  # some are what a drafter says that draws nothing: the target's likeliest token, or not
                if requests[i][3][j]:
                    slots.draft_sources[order[i], num_tokens[i] + j] = native.BY_SUFFIX
                    slots.tokens[order[i], num_tokens[i] + j] = draft_logits[j, i].argmax()
                    slots.draft_probs[order[i], (num_tokens[i] + j) % max_draft_len] = 0.5  # nobody's law
        batch = (
            slots.array,
            order,
            target_logits,
            vocab_size,
            cu_rows,
            num_tokens,
            num_drafts,
            max_draft_len,
        )
        outcomes.append((slots, test(*batch)))
    (slots, result), (expected_slots, expected) = outcomes
    assert (slots.tokens == expected_slots.tokens).all()
    assert (slots.array["draft_counter"] == expected_slots.array["draft_counter"]).all()
    np.testing.assert_allclose(slots.draft_probs, expected_slots.draft_probs, rtol=1e-6)
    tested = int((result.num_accepted + (result.outcome == Outcome.RECOVERED)).sum())
    for name, total in (("num_tested", tested), ("num_passed", int(result.num_accepted.sum()))):
        assert slots.array[name].tolist() == expected_slots.array[name].tolist()
        assert slots.array[name].sum() == total
    for name in ("num_tokens", "num_accepted", "outcome", "row_status"):
        assert getattr(result, name).tolist() == getattr(expected, name).tolist(), name
    for i, count in enumerate(result.num_tokens):
        assert result.token_ids[i, :count].tolist() == expected.token_ids[i, :count].tolist()


@pytest.mark.parametrize("mode", [native.SEEDED, native.SAMPLED])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_the_text_has_the_target_s_distribution(mode, num_drafts):
    check_toy_texts(6000, 3, mode, 3, num_drafts=num_drafts)


def test_chi_square_sees_a_biased_rule():
    """The same harness with drafts that are dropped by their own probability must fail the test above."""
    target, draft = ToyModel(11), ToyModel(12)
    num_slots = 6000
    slots = Slots(num_slots, VOCAB_SIZE, 3, capacity=16)
    for slot in range(num_slots):
        slots.set(slot, tokens=[0, 1], prompt_len=2, key=slot * KEY_STEP % 2**64)
    logits, draft_logits = toy_logits(target), toy_logits(draft)
    slot_ids = np.arange(num_slots, dtype=np.int32)
    known = np.full(num_slots, 2, np.int32)
    sample_draft(slots.array, slot_ids, np.tile(draft_logits[0, 1], (num_slots, 1)), VOCAB_SIZE, known, 3)
    dropped = slots.tokens[:, 2] == draft.probs((0, 1)).argmax()
    rows, pending = np.tile(logits[0, 1], (num_slots, 1)), np.where(dropped, 0, 1).astype(np.int32)
    cu_rows = np.arange(num_slots + 1, dtype=np.int32)
    result = accept(slots.array, slot_ids, rows, VOCAB_SIZE, cu_rows, known, pending, 3)
    counts = np.bincount(result.token_ids[:, 0], minlength=VOCAB_SIZE)
    probs = target.probs((0, 1))
    assert chisquare(counts[probs > 0], num_slots * probs[probs > 0]).pvalue < 1e-6


def random_logits(seed, vocab_size):
    return np.random.default_rng(seed).standard_normal((vocab_size, vocab_size, vocab_size)).astype(np.float32) * 2


@pytest.mark.parametrize("mode", [native.GREEDY, native.SEEDED])
@pytest.mark.parametrize("edits", [{}, {"top_k": 6, "repetition_penalty": 1.2}, {"top_p": 0.8, "temperature": 0.7}])
def test_seeded_and_greedy_text_do_not_depend_on_speculation(mode, edits):
    vocab_size, num_slots, length = 16, 12, 20
    target = random_logits(1, vocab_size)
    near, far = target + random_logits(2, vocab_size) * 0.2, random_logits(3, vocab_size)
    rng = np.random.default_rng(0)

    def texts(draft, num_drafts, verify, order=slice(None)):
        slots = Slots(num_slots, vocab_size, 4, capacity=40)
        for slot, seed in enumerate(np.arange(num_slots)[order].tolist()):
            slots.set(slot, tokens=[seed, 3], prompt_len=2, mode=mode, key=seed, **edits)
        return emit(slots, target, draft, length, num_drafts=num_drafts, verify=verify)

    def all_drafts(slot, tokens, known, drafts):
        return drafts

    def any_length(slot, tokens, known, drafts):
        return int(rng.integers(drafts + 1))

    alone = texts(near, 0, all_drafts)
    assert len({tuple(text) for text in alone.tolist()}) > num_slots // 2
    for draft in (near, far):
        for num_drafts in (1, 2, 4):
            for verify in (all_drafts, up_to_token_0, any_length):
                assert (texts(draft, num_drafts, verify) == alone).all()
    assert (texts(near, 4, up_to_token_0, slice(None, None, -1)) == alone[::-1]).all()


def test_seeded_drafts_of_the_same_distribution_are_always_accepted():
    """Draft and target draw with the same noise."""
    vocab_size, num_slots = 16, 500
    logits = np.random.default_rng(5).standard_normal(vocab_size).astype(np.float32)
    slots = Slots(num_slots, vocab_size, 1)
    for slot in range(num_slots):
        slots.set(slot, tokens=[0], mode=native.SEEDED, key=slot)
    slot_ids, ones = np.arange(num_slots, dtype=np.int32), np.ones(num_slots, np.int32)
    rows = np.tile(logits, (num_slots, 1))
    cu_rows = np.arange(num_slots + 1, dtype=np.int32)
    drafts = sample_draft(slots.array, slot_ids, rows, vocab_size, ones, 1)
    assert np.unique(drafts).size == vocab_size
    assert accept(slots.array, slot_ids, rows, vocab_size, cu_rows, ones, ones, 1).num_accepted.all()


@pytest.mark.parametrize("test", [accept, accept_reference])
def test_a_draft_that_nobody_drew_is_tested_by_the_targets_own_draw(test):
    """The token is the one that would be drawn without it; draft probs, which are nobody's law, are not read."""
    n, vocab_size = 100, 5
    logits = np.random.default_rng(3).standard_normal((n, vocab_size)).astype(np.float32)
    found = []
    for num_drafts in (0, 1):
        slots = Slots(n, vocab_size, 1)
        for slot in range(n):
            slots.set(slot, tokens=[1, 2, slot % vocab_size], key=slot)
            slots.draft_sources[slot, 2] = native.BY_SUFFIX
        batch = (np.arange(n + 1, dtype=np.int32), np.full(n, 2, np.int32), np.full(n, num_drafts, np.int32), 1)
        found.append(test(slots.array, np.arange(n, dtype=np.int32), logits, vocab_size, *batch))
    alone, drafted = found
    assert drafted.token_ids[:, 0].tolist() == alone.token_ids[:, 0].tolist()
    assert drafted.num_accepted.tolist() == (alone.token_ids[:, 0] == np.arange(n) % vocab_size).astype(int).tolist()
    assert 0 < drafted.num_accepted.sum() < n


def test_sampled_randomness_is_never_used_twice():
    """Drafting a position again, after its drafts were dropped, draws fresh numbers."""
    vocab_size, num_slots = 64, 200
    slots = Slots(num_slots, vocab_size, 2)
    for slot in range(num_slots):
        slots.set(slot, key=slot)
    slot_ids, ones = np.arange(num_slots, dtype=np.int32), np.ones(num_slots, np.int32)
    uniform_probs = np.zeros((num_slots, vocab_size), np.float32)
    first = sample_draft(slots.array, slot_ids, uniform_probs, vocab_size, ones, 2)
    second = sample_draft(slots.array, slot_ids, uniform_probs, vocab_size, ones, 2)
    assert (slots.array["draft_counter"] == 2).all()
    assert np.count_nonzero(first == second) < 0.1 * num_slots


class TestOutcomes:
    vocab_size, max_draft_len = 8, 3

    def run(self, drafts, num_rows, logits=None, mode=native.GREEDY, **fields):
        slots = Slots(1, self.vocab_size, self.max_draft_len)
        slots.set(0, tokens=[0, *drafts], mode=mode, **fields)
        if logits is None:  # row j's argmax is token j + 1
            logits = np.eye(self.vocab_size, dtype=np.float32)[1 : num_rows + 1]
        batch = (int32(0), logits, self.vocab_size, int32(0, num_rows), int32(1), int32(len(drafts)))
        result = accept(slots.array, *batch, self.max_draft_len)
        expected = accept_reference(slots.array, *batch, self.max_draft_len)
        assert result.outcome[0] == expected.outcome[0]
        assert result.row_status[0] == expected.row_status[0]
        tokens = result.token_ids[0, : result.num_tokens[0]].tolist()
        return (
            Outcome(result.outcome[0]),
            tokens,
            int(result.num_accepted[0]),
            RowStatus(result.row_status[0]),
        )

    @pytest.mark.parametrize(
        ("drafts", "num_rows", "outcome", "tokens", "num_accepted"),
        [
            ([1, 2], 3, Outcome.BONUS, [1, 2, 3], 2),
            ([], 1, Outcome.BONUS, [1], 0),
            ([1, 2, 3], 2, Outcome.STILL_PENDING, [1, 2], 2),  # the last row's draft has no row
            ([1, 7, 3], 2, Outcome.RECOVERED, [1, 2], 1),
            ([7, 2], 3, Outcome.RECOVERED, [1], 0),
            ([1, 2], 0, Outcome.STILL_PENDING, [], 0),
        ],
    )
    def test_how_a_request_s_rows_end(self, drafts, num_rows, outcome, tokens, num_accepted):
        assert self.run(drafts, num_rows) == (outcome, tokens, num_accepted, RowStatus.OK)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_nan_row_keeps_the_tokens_before_it(self, mode):
        logits = np.full((3, 8), -np.inf, np.float32)
        logits[0, 1] = logits[1, 2] = 0
        logits[1, 5] = np.nan
        fields = {"mode": mode, "key": 1}
        slots = Slots(1, 8, 3)
        slots.set(0, tokens=[0, 1, 2], **fields)
        slots.draft_probs[:] = 1 / 8
        result = accept(slots.array, int32(0), logits, 8, int32(0, 3), int32(1), int32(2), 3)
        assert (result.outcome[0], result.row_status[0]) == (Outcome.FAILED, RowStatus.NAN)
        assert result.token_ids[0, : result.num_tokens[0]].tolist() == [1]

    def test_rows_behind_a_rejection_are_not_looked_at(self):
        logits = np.full((3, 8), np.nan, np.float32)
        logits[0] = np.arange(8)
        assert self.run([1, 2], 3, logits) == (Outcome.RECOVERED, [7], 0, RowStatus.OK)

    def test_all_banned(self):
        outcome, tokens, _, status = self.run([], 1, bad_words=[[v] for v in range(8)])
        assert (outcome, tokens, status) == (Outcome.FAILED, [], RowStatus.EMPTY)

    def test_edits_see_the_drafts_before_the_row(self):
        # after draft 1, token 2 completes the bad word (1, 2): the second row's argmax moves on
        logits = np.zeros((2, 8), np.float32)
        logits[0, 1], logits[1, 2], logits[1, 5] = 3, 3, 2
        assert self.run([1], 2, logits)[1] == [1, 2]
        assert self.run([1], 2, logits, bad_words=[[1, 2]])[1] == [1, 5]

    def test_a_draft_the_target_rules_out_is_rejected(self):
        slots = Slots(1, 4, 1)
        logits = np.array([[-np.inf, 0, 0, -np.inf]], np.float32)
        for key in range(50):
            slots.set(0, tokens=[1, 0], key=key)
            slots.draft_probs[0, 1 % 1] = [1, 0, 0, 0]
            result = accept(slots.array, int32(0), logits, 4, int32(0, 1), int32(1), int32(1), 1)
            assert result.outcome[0] == Outcome.RECOVERED
            assert result.token_ids[0, 0] in (1, 2)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ({"num_drafts": 1}, InvalidArgumentError, "testing drafts"),  # more rows than drafts and one
        ({"num_rows": 1, "num_drafts": 3}, InvalidArgumentError, "testing drafts"),  # more than max_draft_len
        ({"tokens": [0, 1, 4]}, InvalidArgumentError, "token id"),
        ({"draft_probs": 0}, InvalidArgumentError, "testing drafts"),
        (
            {"num_rows": 1, "num_drafts": 0, "array": 0},
            InvalidArgumentError,
            "testing drafts",
        ),  # a slot that no request has
        ({"logits": np.zeros((3, 4))}, TypeError, "float32"),
        ({"logits": np.zeros((3, 3), np.float32)}, ValueError, "logits"),
        ({"logits": np.zeros((2, 4), np.float32)}, ValueError, "rows"),
    ],
)
def test_misuse_is_refused(broken, error, message):
    given_ = {"num_rows": 3, "num_drafts": 2, "tokens": [0, 1, 2], "logits": np.zeros((3, 4), np.float32)} | broken
    slots = Slots(1, 4, 2)
    slots.set(0, tokens=given_["tokens"])
    if "draft_probs" in broken:
        slots.array["draft_probs"] = 0
    if "array" in broken:
        slots.array[0] = 0
    counts = (int32(0, given_["num_rows"]), int32(1), int32(given_["num_drafts"]))
    with pytest.raises(error, match=message):
        accept(slots.array, int32(0), given_["logits"], 4, *counts, 2)


@pytest.mark.parametrize("edits", [{}, {"top_k": 700, "top_p": 0.95}])
def test_native_is_the_reference_in_a_large_vocabulary_on_any_number_of_threads(edits):
    vocab_size, num_slots, m = 5003, 30, 2
    rng = np.random.default_rng(2)
    target = rng.standard_normal((num_slots * (m + 1), vocab_size)).astype(np.float32)
    slot_ids, ones = np.arange(num_slots, dtype=np.int32), np.ones(num_slots, np.int32)
    pool = native.library().faser_pool_create(None, 2, 0)
    threaded = [partial(function, pool=pool) for function in (sample_draft, accept)]
    found = []
    for draft, test in ((sample_draft, accept), threaded, (sample_draft_reference, accept_reference)):
        slots = Slots(num_slots, vocab_size, m)
        for slot in range(num_slots):
            slots.set(slot, tokens=[1], mode=MODES[slot % 3], key=slot, **edits)
        for j in range(m):
            draft(slots.array, slot_ids, target[j :: m + 1] * np.float32(1.2), vocab_size, ones + np.int32(j), m)
        cu_rows = np.arange(num_slots + 1, dtype=np.int32) * (m + 1)
        result = test(slots.array, slot_ids, target, vocab_size, cu_rows, ones, 2 * ones, m)
        found.append((slots.tokens.tolist(), result.token_ids.tolist(), result.outcome.tolist()))
        assert {Outcome.RECOVERED, Outcome.BONUS} <= set(result.outcome.tolist())
    native.library().faser_pool_destroy(pool)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("broken", [[0, 1, 2, 3], [2]])
def test_a_draft_whose_distribution_is_nan_is_rejected_and_the_target_draws(broken):
    """A device may copy such a distribution back; native sampling itself drafts nothing from NaN logits."""
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]] * 2, np.float32))
    seen = np.zeros(4)
    for key in range(2000):
        slots = Slots(1, 4, 1)
        slots.set(0, key=key, tokens=[0, 2])
        slots.draft_probs[0] = 0.25
        slots.draft_probs[0, :, broken] = np.nan
        found = accept(slots.array, int32(0), logits, 4, int32(0, 2), int32(1), int32(1), 1)
        assert (found.outcome[0], found.num_accepted[0]) == (Outcome.RECOVERED, 0)
        seen[found.token_ids[0, 0]] += 1
    if len(broken) == 4:
        assert chisquare(seen, 2000 * np.array([0.1, 0.2, 0.3, 0.4])).pvalue > 1e-3
