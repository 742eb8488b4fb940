"""The distribution of the next token: native against the reference, and both against a plain, independent one."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from faser_trtllm import native
from faser_trtllm.ops.probs import RowStatus, next_token_probs
from lab.reference.probs import exp_non_positive, next_token_probs_reference
from tests.support.effort import examples
from tests.support.sampling_slots import Slots

PATHS = [next_token_probs, next_token_probs_reference]


def evaluate(path, logits, num_tokens=1, **fields):
    slots = Slots(1, len(logits), 1)
    slots.set(0, **fields)
    probs = np.empty(len(logits), np.float32)
    status = path(slots.array, 0, np.array(logits, np.float32), num_tokens, probs)
    return status, probs


def plain_probs(logits, history, *, prompt_len=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **edits):
    """Written from the definitions, token by token, in float64."""
    n = len(logits)
    x = [float(v) for v in logits]
    for v in range(n):
        count = list(history).count(v)
        if count:
            repetition = edits.get("repetition_penalty", 1.0)
            x[v] = x[v] / repetition if x[v] > 0 else x[v] * repetition
            x[v] -= edits.get("presence_penalty", 0.0) + count * edits.get("frequency_penalty", 0.0)
    for token, value in edits.get("bias", ()):
        x[token] += value
    for *prefix, last in edits.get("bad_words", ()):
        if list(history[len(history) - len(prefix) :]) == prefix:
            x[last] = -np.inf
    if len(history) - prompt_len < edits.get("min_tokens", 0):
        for token in edits.get("end_ids", ()):
            x[token] = -np.inf
    if "masks" in edits:
        allowed = edits["masks"][len(history) % len(edits["masks"])]
        x = [value if ok else -np.inf for value, ok in zip(x, allowed, strict=True)]
    if max(x) == -np.inf:
        return None
    p = np.exp((np.array(x) - max(x)) / temperature)
    p /= p.sum()
    ranked = sorted(range(n), key=lambda v: (-x[v], v))
    if top_k:
        ranked = ranked[:top_k]
    kept, mass, total = [], 0.0, sum(p[v] for v in ranked)
    for v in ranked:
        kept.append(v)
        mass += p[v] / total
        if mass >= top_p and top_p < 1:
            break
    kept = [v for v in kept if p[v] >= min_p * p.max()]
    out = np.zeros(n)
    out[kept] = p[kept]
    return out / out.sum()


@st.composite
def cases(draw):
    n = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.5, 3.0, 12.0]))
    logits = (rng.standard_normal(n) * scale).astype(np.float32)
    if draw(st.booleans()):  # ties
        logits = np.round(logits)
    history = rng.integers(0, n, draw(st.integers(1, 20))).astype(np.int32)
    token = st.integers(0, n - 1)
    fields = {
        "prompt_len": draw(st.integers(1, history.size)),
        "temperature": draw(st.sampled_from([0.25, 0.7, 1.0, 1.9])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 5, 39, 1000])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.97, 0.61, 0.1, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.03, 0.4])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5, -0.4])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.3, -0.2])),
        "bias": draw(st.lists(st.tuples(token, st.sampled_from([-50.0, -1.5, 2.5])), max_size=4)),
        "bad_words": draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=6)),
        "end_ids": draw(st.lists(token, max_size=2)),
        "min_tokens": draw(st.sampled_from([0, 4, 40])),
    }
    if draw(st.booleans()):
        fields["masks"] = rng.random((draw(st.integers(1, 3)), n)) < draw(st.sampled_from([0.02, 0.3, 0.9, 1.0]))
    if draw(st.booleans()):  # a bad word that does bite
        fields["bad_words"].append([*history[-2:].tolist(), draw(token)])
    return logits, history, fields


@settings(max_examples=examples(300), derandomize=True)
@given(cases())
def test_native_is_the_reference(case):
    logits, history, fields = case
    status, probs = evaluate(next_token_probs, logits, history.size, tokens=history, **fields)
    expected_status, expected = evaluate(next_token_probs_reference, logits, history.size, tokens=history, **fields)
    assert status == expected_status
    if status is RowStatus.OK:
        assert ((probs > 0) == (expected > 0)).all()
        np.testing.assert_allclose(probs, expected, rtol=2e-7, atol=0)


@settings(max_examples=examples(300), derandomize=True)
@given(cases())
def test_native_is_the_plain_distribution(case):
    logits, history, fields = case
    status, probs = evaluate(next_token_probs, logits, history.size, tokens=history, **fields)
    expected = plain_probs(logits, history, **fields)
    assert (status is RowStatus.EMPTY) == (expected is None)
    if expected is not None:
        for name in ("top_p", "min_p"):  # a cut within float32's rounding may fall on either side
            for factor in (1 - 1e-5, 1 + 1e-5):
                moved = plain_probs(logits, history, **{**fields, name: min(1.0, fields[name] * factor)})
                assume(np.count_nonzero(moved) == np.count_nonzero(expected) or fields[name] in (0.0, 1.0))
        np.testing.assert_allclose(probs, expected, rtol=2e-4, atol=1e-30)


@settings(max_examples=examples(100), derandomize=True)
@given(cases())
def test_greedy_is_the_argmax_of_the_edited_logits(case):
    logits, history, fields = case
    fields["mode"] = native.GREEDY
    status, probs = evaluate(next_token_probs, logits, history.size, tokens=history, **fields)
    edits = {k: v for k, v in fields.items() if k not in ("mode", "temperature", "top_k", "top_p", "min_p")}
    expected = plain_probs(logits, history, top_k=1, **edits)
    assert (status is RowStatus.EMPTY) == (expected is None)
    if expected is not None and np.unique(logits).size == logits.size:
        assert probs.argmax() == expected.argmax()
        assert probs.sum() == 1


def test_exp_is_exp():
    z = -np.linspace(0, 72, 20001).astype(np.float32)
    assert exp_non_positive(np.zeros(1, np.float32))[0] == 1
    np.testing.assert_allclose(exp_non_positive(z), np.exp(z.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("path", PATHS)
class TestEdges:
    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
    @pytest.mark.parametrize("where", [0, 40, 99])
    @pytest.mark.parametrize("mode", [native.GREEDY, native.SEEDED, native.SAMPLED])
    def test_nan_and_infinity_have_no_distribution(self, path, bad, where, mode):
        logits = np.linspace(-1, 1, 100, dtype=np.float32)
        logits[where] = bad
        assert evaluate(path, logits, mode=mode)[0] is RowStatus.NAN

    @pytest.mark.parametrize("mode", [native.GREEDY, native.SEEDED, native.SAMPLED])
    def test_all_banned_is_empty(self, path, mode):
        assert evaluate(path, [0, 1, 2], mode=mode, bad_words=[[0], [1], [2]])[0] is RowStatus.EMPTY
        assert evaluate(path, [-np.inf] * 20, mode=mode)[0] is RowStatus.EMPTY

    def test_what_the_model_rules_out_stays_out(self, path):
        status, probs = evaluate(path, [-np.inf, 1, 2], bias=[(0, 100.0)], repetition_penalty=0.5, tokens=[0])
        assert status is RowStatus.OK
        assert probs[0] == 0

    def test_top_k_beyond_the_vocabulary_is_off(self, path):
        _, expected = evaluate(path, [0, 1, 2])
        assert evaluate(path, [0, 1, 2], top_k=1000)[1].tolist() == expected.tolist()
        assert evaluate(path, [0, 1, 2], top_k=3)[1].tolist() == expected.tolist()

    def test_ties_go_to_the_lower_id(self, path):
        assert evaluate(path, [5, 5, 5, 5], top_k=2)[1].tolist() == [0.5, 0.5, 0, 0]
        assert evaluate(path, [1, 5, 5, 5], top_p=0.1)[1].tolist() == [0, 1, 0, 0]
        assert evaluate(path, [-0.0, 0.0], mode=native.GREEDY)[1].tolist() == [1, 0]

    def test_top_p_keeps_the_token_that_reaches_it(self, path):
        logits = [0, 0, 0, 0]
        assert evaluate(path, logits, top_p=0.5)[1].tolist() == [0.5, 0.5, 0, 0]
        assert np.count_nonzero(evaluate(path, logits, top_p=0.50001)[1]) == 3
        assert np.count_nonzero(evaluate(path, logits, top_p=1e-30)[1]) == 1

    def test_top_p_counts_within_top_k(self, path):
        # two of four equal tokens: half of what top_k leaves is one token, though a quarter of the vocabulary
        assert evaluate(path, [0, 0, 0, 0], top_k=2, top_p=0.5)[1].tolist() == [1, 0, 0, 0]

    def test_min_p_is_relative_to_the_maximum(self, path):
        logits = np.log([0.5, 0.3, 0.2])
        assert np.count_nonzero(evaluate(path, logits, min_p=0.5)[1]) == 2
        assert np.count_nonzero(evaluate(path, logits, min_p=0.99)[1]) == 1

    @pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
    def test_huge_logits(self, path, temperature):
        status, probs = evaluate(path, [3e38, -3e38, 3e38, 0], temperature=temperature)
        assert status is RowStatus.OK
        assert probs.tolist() == [0.5, 0, 0.5, 0]

    def test_edits_do_not_overflow(self, path):
        status, probs = evaluate(path, [3e38, -3e38, 1.0], tokens=[0], repetition_penalty=0.01, bias=[(1, -3e38)])
        assert status is RowStatus.OK
        assert probs.tolist() == [1, 0, 0]

    def test_penalties_count_prompt_and_output(self, path):
        _, probs = evaluate(path, [0, 0, 0], num_tokens=3, tokens=[0, 1, 1], frequency_penalty=np.log(2))
        np.testing.assert_allclose(probs, np.array([2, 1, 4]) / 7, rtol=1e-6)
        _, probs = evaluate(path, [0, 0, 0], num_tokens=3, tokens=[0, 1, 1], presence_penalty=np.log(2))
        np.testing.assert_allclose(probs, np.array([1, 1, 2]) / 4, rtol=1e-6)

    def test_min_tokens_bans_end_ids_until_reached(self, path):
        banned = {"tokens": [0, 1, 1], "prompt_len": 1, "end_ids": [2], "min_tokens": 2}
        assert evaluate(path, [0, 0, 9], num_tokens=2, **banned)[1][2] == 0
        assert evaluate(path, [0, 0, 9], num_tokens=3, **banned)[1][2] > 0.9


def test_counters_are_clean_between_calls():
    """A penalised call must not leave counts behind for the next one."""
    logits = np.zeros(8, np.float32)
    first = evaluate(next_token_probs, logits, 4, tokens=[1, 1, 2, 3], frequency_penalty=0.5)[1]
    evaluate(next_token_probs, logits, 4, tokens=[5, 5, 5, 5], frequency_penalty=0.5)
    again = evaluate(next_token_probs, logits, 4, tokens=[1, 1, 2, 3], frequency_penalty=0.5)[1]
    assert again.tolist() == first.tolist()


@pytest.mark.parametrize("vocab_size", [31, 4096, 151936])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (1000, 0.95), (20000, 0.999)])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 5.0])
def test_large_vocabularies(vocab_size, top_k, top_p, temperature):
    logits = np.random.default_rng(vocab_size + top_k).standard_normal(vocab_size) * 3
    fields = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    _, probs = evaluate(next_token_probs, logits, **fields)
    _, expected = evaluate(next_token_probs_reference, logits, **fields)
    assert ((probs > 0) == (expected > 0)).all()
    np.testing.assert_allclose(probs, expected, rtol=2e-7)
    assert probs.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
