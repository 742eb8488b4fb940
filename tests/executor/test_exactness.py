"""Speculation changes nothing: greedy and seeded tokens bit for bit, unseeded sampling in distribution."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from faser_trtllm.core.sampling_params import SamplingParams
from tests.executor.harness import Collector, Setup, run
from tests.executor.toy_engine import context_row

VOCAB = 5
POLICIES = ["fixed:1", "fixed:3", "fixed:4", "fixed:4:draft_ahead", "fixed:3:ping_pong", "erratic", "erratic"]
POLICIES += ["schedule", "gp_lcb", "price", "price:mode=draft_ahead", "price:mode=ping_pong,prune=on", "price:prune=on"]


CUTS = {"timeout": "timeout", "cancel": "cancelled"}


def greedy_reference(table, prompt, max_tokens, end_ids=()):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = int(np.argmax(table[context_row(tokens, len(tokens) - 1, table.shape[1])]))
        if token in end_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@st.composite
def setups(draw):
    """Batch sizes, policies, chunk sizes, block sizes, tight caches: everything that must not matter."""
    max_batch_size = draw(st.sampled_from([1, 2, 3, 8]))
    capacity = draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]))
    tokens_per_block = draw(st.sampled_from([2, 4, 16]))
    blocks_for_one = -(-64 // tokens_per_block)
    return Setup(
        vocab_size=VOCAB,
        table_seed=draw(st.integers(0, 3)),
        noise=draw(st.sampled_from([0.0, 0.7, 3.0])),
        policy=draw(st.sampled_from(POLICIES)),
        max_batch_size=max_batch_size,
        max_num_tokens=draw(st.sampled_from([8, 11, 64])),
        tokens_per_block=tokens_per_block,
        num_blocks=blocks_for_one * draw(st.sampled_from([1, 2, 8])),
        capacity=capacity,
        reuse=draw(st.booleans()),
        chunk_unit_size=draw(st.sampled_from([1, 2, 4])),
        policy_seed=draw(st.integers(0, 1000)),
    )


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups(), data=st.data())
def test_greedy_tokens_are_the_targets_own(setup, data):
    requests, arrivals = [], []
    for _ in range(data.draw(st.integers(1, 8))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 40)),
            end_ids=data.draw(st.sampled_from([(), (2,), (0, 4)])),
            num_draft_tokens=data.draw(st.sampled_from([None, None, 0, 2])),
        )
        requests.append((data.draw(prompts), params))
        arrivals.append(data.draw(st.integers(0, 12)))
    result = run(setup, requests, arrivals)
    table = setup.target.table
    for index, (prompt, params) in enumerate(requests):
        room = min(params.max_tokens, setup.max_seq_len - len(prompt))
        expected = greedy_reference(table, prompt, room, params.end_ids)
        assert result.tokens[str(index)] == expected
        assert result.reasons[str(index)] == ("length" if len(expected) == room else "stop")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups(), data=st.data())
def test_seeded_text_is_a_function_of_seed_prompt_and_target(setup, data):
    """Against speculation off, one request at a time."""
    requests = []
    for _ in range(data.draw(st.integers(1, 6))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 30)),
            temperature=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
            top_k=data.draw(st.sampled_from([None, 3])),
            top_p=data.draw(st.sampled_from([None, 0.8])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            bad_words=data.draw(st.sampled_from([(), ((1, 2), (3,))])),
            min_tokens=1,
            end_ids=data.draw(st.sampled_from([(), (2,)])),
        )
        requests.append((data.draw(prompts), params))
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    speculative = run(setup, requests, arrivals)
    plain = Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    for index, request in enumerate(requests):
        assert speculative.tokens[str(index)] == run(plain, [request]).tokens["0"]


def check_early_ends(setup, data):
    """Requests cut by a deadline or a cancellation at any step have a beginning of their text; the others have all."""
    requests, arrivals, cuts = [], [], []
    for _ in range(data.draw(st.integers(2, 8))):
        seeded = {"temperature": 0.8, "seed": data.draw(st.integers(0, 9)), "repetition_penalty": 1.3}
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 30)), **data.draw(st.sampled_from([{}, seeded])))
        requests.append((data.draw(prompts), params))
        arrivals.append(data.draw(st.integers(0, 6)))
        cut = st.tuples(st.sampled_from(sorted(CUTS)), st.integers(0, 12))
        cuts.append(data.draw(st.one_of(st.none(), cut)))
    result = run(setup, requests, arrivals, cuts)
    plain = Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    for index, (request, cut) in enumerate(zip(requests, cuts, strict=True)):
        expected, tokens = run(plain, [request]).tokens["0"], result.tokens[str(index)]
        reason = result.reasons[str(index)]
        assert reason == "length" or (cut is not None and reason == CUTS[cut[0]])
        assert tokens == (expected if reason == "length" else expected[: len(tokens)])


@settings(max_examples=80)
@given(setup=setups(), data=st.data())
def test_requests_that_end_early_change_nothing_for_the_others(setup, data):
    check_early_ends(setup, data)


def _law_of_three(table, prompt, temperature):
    """Probability of each continuation of three tokens, by enumeration."""
    law = {}
    vocab_size = table.shape[1]
    for continuation in itertools.product(range(vocab_size), repeat=3):
        tokens, probability = list(prompt), 1.0
        for token in continuation:
            logits = table[context_row(tokens, len(tokens) - 1, vocab_size)].astype(np.float64) / temperature
            weights = np.exp(logits - logits.max())
            probability *= weights[token] / weights.sum()
            tokens.append(token)
        law[continuation] = probability
    return law


NUM_SAMPLES = 5000  # for 27 continuations; the wrong law below is told from so many


@pytest.mark.parametrize(
    "policy", ["fixed:1", "fixed:3", "fixed:2:draft_ahead", "fixed:3:ping_pong", "erratic", "price:prune=on"]
)
def test_unseeded_sampling_has_the_targets_distribution(policy, monkeypatch):
    """Chi-square over all continuations of three tokens; the keys are fixed, so the outcome is too."""
    keys = np.random.default_rng(7)
    monkeypatch.setattr("os.urandom", lambda n: keys.bytes(n))
    setup = Setup(
        vocab_size=3,
        table_seed=11,
        noise=1.5,
        policy=policy,
        max_batch_size=64,
        max_num_tokens=400,
        num_blocks=512,
    )
    prompt, num_requests = [1, 2, 0], NUM_SAMPLES
    params = SamplingParams(max_tokens=6, temperature=1.3)
    result = run(setup, [(prompt, params)] * num_requests)
    seen = Counter(tuple(tokens[:3]) for tokens in result.tokens.values())
    law = _law_of_three(setup.target.table, prompt, 1.3)
    accepted = sum(r.stats.num_accepted_tokens for r in result.requests.values())
    drafted = sum(r.stats.num_draft_tokens for r in result.requests.values())
    assert 0.2 * drafted < accepted < 0.95 * drafted, "both accepts and rejects must occur for this to test anything"
    expected = np.array([law[c] * num_requests for c in sorted(law)])
    observed = np.array([seen[c] for c in sorted(law)])
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_the_chi_square_notices_a_wrong_law():
    """The same test on the draft's law fails, so passing means something."""
    setup = Setup(vocab_size=3, table_seed=11, noise=1.5)
    target, draft = setup.make_tables()
    law, wrong = _law_of_three(target, [1, 2, 0], 1.3), _law_of_three(draft, [1, 2, 0], 1.3)
    expected = np.array([law[c] * NUM_SAMPLES for c in sorted(law)])
    observed = np.array([wrong[c] * NUM_SAMPLES for c in sorted(law)])
    assert stats.chisquare(observed, expected).pvalue < 1e-6


def test_preemption_happens_and_changes_nothing():
    setup = Setup(
        policy="fixed:4",
        capacity="MAX_UTILIZATION",
        num_blocks=20,
        tokens_per_block=4,
        max_batch_size=8,
        reuse=False,
    )
    requests = [([i % VOCAB, 1, 2], SamplingParams(max_tokens=40)) for i in range(8)]
    result = run(setup, requests)
    assert sum(r.stats.num_preemptions for r in result.requests.values()) > 0
    for index, (prompt, params) in enumerate(requests):
        assert result.tokens[str(index)] == greedy_reference(setup.target.table, prompt, params.max_tokens)


@pytest.mark.parametrize("policy", ["erratic", "price:prune=on", "price:mode=ping_pong,prune=on"])
def test_rows_are_pruned_inside_a_pass_and_nothing_changes(policy):
    setup = Setup(policy=policy, noise=1.5, max_num_tokens=64, max_seq_len=64)
    requests = [([i % VOCAB, 1, 2], SamplingParams(max_tokens=50)) for i in range(8)]
    result = run(setup, requests)
    pruned = sum(r.stats.num_pruned_rows for r in result.requests.values())
    if policy != "price:mode=ping_pong,prune=on":
        assert pruned > 0, "nothing was pruned, so this tests nothing"
    for index, (prompt, params) in enumerate(requests):
        assert result.tokens[str(index)] == greedy_reference(setup.target.table, prompt, params.max_tokens)


@pytest.mark.parametrize("mode", ["draft_ahead", "ping_pong"])
def test_lanes_overlap_and_every_request_gets_on(mode):
    setup = Setup(policy=f"fixed:3:{mode}", max_batch_size=4)
    executor, collector = setup.open(), Collector()
    for index in range(6):
        executor.submit(str(index), [index % VOCAB, 3], SamplingParams(max_tokens=30), collector.sink(str(index)))
    while executor.step():
        executor.check_integrity()
    stats = executor.stats()
    executor.close()
    assert stats[f"num_steps_{mode}"] == stats["num_steps"]
    assert stats["num_accepted_tokens"] > 0
    for index in range(6):
        assert collector.tokens[str(index)] == greedy_reference(setup.target.table, [index % VOCAB, 3], 30)
