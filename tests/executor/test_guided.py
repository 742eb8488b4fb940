"""Guided requests: speculation changes nothing, under every policy, and requests without a guide do not notice them."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from faser_trtllm.core.sampling_params import SamplingParams
from tests.support.effort import examples, pick
from tests.support.executor_harness import Setup, run
from tests.support.random_setups import POLICIES, VOCAB, prompts, setups
from tests.support.toy_engine import context_row
from tests.support.toy_guide import ToyGuide

END = 4
guides = st.builds(lambda seed: ToyGuide.random(VOCAB, seed, END), st.integers(0, 50))


def greedy_reference(table, prompt, max_tokens, params):
    """Tokens and finish reason of the target alone, token by token from the definition."""
    output = []
    while len(output) < max_tokens:
        tokens = list(prompt) + output
        logits = table[context_row(tokens, len(tokens) - 1, table.shape[1])].copy()
        if params.guide is not None:
            allowed = params.guide.allowed(output, params.end_ids)
            logits[[v for v in range(VOCAB) if v not in allowed]] = -np.inf
            if not set(allowed) & set(params.allowed_token_ids or allowed):
                return output, "stop" if END in params.guide.allowed(output, (END,)) else "length"
        if params.allowed_token_ids is not None:
            logits[[v for v in range(VOCAB) if v not in params.allowed_token_ids]] = -np.inf
        token = int(np.argmax(logits))
        if token in params.end_ids:
            return output, "stop"
        output.append(token)
    return output, "length"


@settings(max_examples=examples(60))
@given(setup=setups(), data=st.data())
def test_greedy_tokens_are_those_of_the_masked_target(setup, data):
    requests, arrivals = [], []
    for _ in range(data.draw(st.integers(1, 6))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 40)),
            end_ids=data.draw(st.sampled_from([(), (END,)])),
            num_draft_tokens=data.draw(st.sampled_from([None, None, 0, 2])),
            guide=data.draw(st.one_of(st.none(), guides, guides)),
            allowed_token_ids=data.draw(st.sampled_from([None, None, (0, 2, 3), (1, END), (3,)])),
        )
        requests.append((data.draw(prompts), params))
        arrivals.append(data.draw(st.integers(0, 12)))
    result = run(setup, requests, arrivals)
    for index, (prompt, params) in enumerate(requests):
        room = min(params.max_tokens, setup.max_seq_len - len(prompt))
        expected = greedy_reference(setup.target.table, prompt, room, params)
        assert (result.tokens[str(index)], result.reasons[str(index)]) == expected


@settings(max_examples=examples(40))
@given(setup=setups(), data=st.data())
def test_seeded_tokens_are_those_without_speculation(setup, data):
    requests = []
    for _ in range(data.draw(st.integers(1, 5))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 30)),
            temperature=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
            top_k=data.draw(st.sampled_from([None, 3])),
            top_p=data.draw(st.sampled_from([None, 0.8])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            bad_words=data.draw(st.sampled_from([(), ((1, 2),)])),
            end_ids=data.draw(st.sampled_from([(), (END,)])),
            guide=data.draw(st.one_of(st.none(), guides, guides)),
            allowed_token_ids=data.draw(st.sampled_from([None, None, (0, 2, 3), (1, END), (3,)])),
        )
        requests.append((data.draw(prompts), params))
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    speculative = run(setup, requests, arrivals)
    plain = Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    for index, request in enumerate(requests):
        alone = run(plain, [request])
        assert speculative.tokens[str(index)] == alone.tokens["0"]
        assert speculative.reasons[str(index)] == alone.reasons["0"]
        guide = request[1].guide
        assert guide is None or guide.allowed(alone.tokens["0"], ()) is not None
        assert set(alone.tokens["0"]) <= set(request[1].allowed_token_ids or range(VOCAB))


def probs_of_three(table, guide, prompt, temperature):
    """Probability of each continuation of three tokens under the masked target, by enumeration."""
    probs = {}
    for continuation in itertools.product(range(table.shape[1]), repeat=3):
        tokens, probability = list(prompt), 1.0
        for place, token in enumerate(continuation):
            allowed = guide.allowed(continuation[:place], ())
            if allowed is None or token not in allowed:
                probability = 0.0
                break
            logits = table[context_row(tokens, len(tokens) - 1, table.shape[1])].astype(np.float64) / temperature
            weights = np.exp(logits - logits.max())
            probability *= weights[token] / weights[list(allowed)].sum()
            tokens.append(token)
        if probability:
            probs[continuation] = probability
    return probs


@pytest.mark.parametrize("policy", [*pick([], ["fixed:3", "fixed:2:draft_ahead"]), "erratic", "price:prune=on"])
def test_unseeded_sampling_has_the_distribution_of_the_masked_target(policy, monkeypatch):
    """Chi-square over all continuations of three tokens; the keys are fixed, so the outcome is too."""
    keys = np.random.default_rng(7)
    monkeypatch.setattr("os.urandom", lambda n: keys.bytes(n))
    setup = Setup(vocab_size=3, table_seed=11, noise=1.5, policy=policy, max_batch_size=64, max_num_tokens=400)
    setup.num_blocks = 512
    edges = {0: {0: 1, 1: 2, 2: 0}, 1: {1: 0, 2: 2}, 2: {0: 0, 2: 1}}
    guide = ToyGuide(edges, set(), 3)
    prompt, num_requests = [1, 2, 0], pick(1000, 3000)
    params = SamplingParams(max_tokens=6, temperature=1.3, guide=guide)
    result = run(setup, [(prompt, params)] * num_requests)
    accepted = sum(r.stats.num_accepted_tokens for r in result.requests.values())
    drafted = sum(r.stats.num_draft_tokens for r in result.requests.values())
    assert 0.2 * drafted < accepted < 0.97 * drafted, "both accepts and rejects must occur for this to test anything"
    seen = Counter(tuple(tokens[:3]) for tokens in result.tokens.values())
    probs = probs_of_three(setup.target.table, guide, prompt, 1.3)
    assert set(seen) <= set(probs), "a token that the guide forbids"
    expected = np.array([probs[c] * num_requests for c in sorted(probs)])
    assert stats.chisquare(np.array([seen[c] for c in sorted(probs)]), expected).pvalue > 1e-3


@pytest.mark.parametrize("policy", POLICIES[:5])
@pytest.mark.parametrize("end_ids", [(), (END,)])
def test_a_guide_at_its_end_ends_the_request_with_stop(policy, end_ids):
    line = ToyGuide({0: {1: 1}, 1: {3: 2}, 2: {0: 3}, 3: {}}, {3}, VOCAB)
    requests = [([2, 1], SamplingParams(max_tokens=20, end_ids=end_ids, guide=line))] * 3
    result = run(Setup(policy=policy), requests)
    assert set(map(tuple, result.tokens.values())) == {(1, 3, 0)}
    assert set(result.reasons.values()) == {"stop"}


def test_a_drafted_end_that_is_rejected_leaves_nothing_behind():
    """Behind a drafted end id nothing is allowed; when the target goes on instead, that must not last."""
    setup = Setup(table_seed=2, noise=3.0, policy="fixed:1", max_batch_size=1)
    params = SamplingParams(max_tokens=5, end_ids=(END,), guide=ToyGuide.random(VOCAB, 8, END))
    result = run(setup, [([2], params)])
    assert (result.tokens["0"], result.reasons["0"]) == greedy_reference(setup.target.table, [2], 5, params)


def test_a_guide_without_a_way_on_ends_the_request_with_length():
    dead = ToyGuide({0: {1: 1}, 1: {}}, set(), VOCAB)
    result = run(Setup(policy="fixed:3"), [([2], SamplingParams(max_tokens=20, end_ids=(END,), guide=dead))])
    assert (result.tokens["0"], result.reasons["0"]) == ([1], "length")


@pytest.mark.parametrize("policy", ["off", "fixed:1", "fixed:4", "fixed:4:draft_ahead", "fixed:3:ping_pong"])
def test_a_guide_that_fails_ends_its_request_where_the_target_alone_would(policy):
    """Drafting comes there first, and must not fail the request early; the others go on."""
    everything = {0: dict.fromkeys(range(END), 0)}
    failing = ToyGuide(everything, set(), VOCAB, fails_at=5)
    requests = [([2, 1], SamplingParams(max_tokens=20, guide=failing)), ([1, 1], SamplingParams(max_tokens=20))]
    result = run(Setup(policy=policy), requests)
    expected, _ = greedy_reference(Setup().make_tables()[0], [2, 1], 5, SamplingParams(guide=failing))
    assert (result.tokens["0"], result.reasons["0"]) == (expected, "error")
    assert result.requests["0"].error == "the grammar takes too long"
    expected = greedy_reference(Setup().make_tables()[0], [1, 1], 20, SamplingParams())
    assert (result.tokens["1"], result.reasons["1"]) == expected


def test_an_interrupt_while_drafting_is_not_lost():
    """The native draft loop calls back to have masks written, and ctypes drops what is raised there."""

    class Interrupted(ToyGuide):
        def start(self, end_ids):
            state = super().start(end_ids)
            fill = state.fill

            def interrupted(mask):
                fill(mask)
                if self.num_fills == 2:
                    raise KeyboardInterrupt

            state.fill = interrupted
            return state

    guide = Interrupted({0: {0: 0, 1: 0}}, set(), VOCAB)
    with pytest.raises(KeyboardInterrupt):
        run(Setup(policy="fixed:3"), [([2, 1], SamplingParams(max_tokens=20, guide=guide))])
    assert guide.num_fills == 2


def test_a_mask_is_written_once():
    """Where all drafts are accepted, draft and target share the masks."""
    guide = ToyGuide.random(VOCAB, 3, END)
    result = run(Setup(policy="fixed:3", noise=0.0), [([2, 1], SamplingParams(max_tokens=30, guide=guide))])
    stats_ = result.requests["0"].stats
    assert stats_.num_accepted_tokens > 15
    assert guide.num_fills == 30


def test_log_probs_are_of_the_masked_distribution():
    line = ToyGuide({0: {1: 1}, 1: {3: 2}, 2: {0: 3, 1: 3}, 3: {}}, {3}, VOCAB)
    params = SamplingParams(max_tokens=20, guide=line, return_log_probs=True)
    for policy in ("off", "fixed:3"):
        request = run(Setup(policy=policy), [([2, 1], params)]).requests["0"]
        assert list(request.output_log_probs[:2]) == [0.0, 0.0], "there was no choice"
        assert request.output_log_probs[2] < 0
