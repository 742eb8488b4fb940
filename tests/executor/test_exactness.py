"""Speculation changes nothing: greedy and seeded tokens bit for bit, unseeded sampling in distribution."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from faser_trtllm.core.sampling_params import SamplingParams
from tests.support.effort import examples, pick
from tests.support.executor_harness import Collector, Setup, run
from tests.support.random_setups import VOCAB, check_early_ends, greedy_reference, prompts, setups
from tests.support.toy_engine import context_row

pytestmark = pytest.mark.slow


@settings(max_examples=examples(120))
@given(setup=setups(), data=st.data())
def test_greedy_tokens_are_the_targets_own(setup, data):
    requests, arrivals = [], []
    for _ in range(data.draw(st.integers(1, 8))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 40)),
            end_ids=data.draw(st.sampled_from([(), (2,), (0, 4)])),
            num_draft_tokens=data.draw(st.sampled_from([None, None, 0, 2])),
            drafters=data.draw(st.sampled_from([None, None, *((name,) for name in setup.drafter_names())])),
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


@settings(max_examples=examples(60))
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


@settings(max_examples=examples(80))
@given(setup=setups(), data=st.data())
def test_requests_that_end_early_change_nothing_for_the_others(setup, data):
    check_early_ends(setup, data)


def _probs_of_three(table, prompt, temperature):
    """Probability of each continuation of three tokens, by enumeration."""
    probs = {}
    vocab_size = table.shape[1]
    for continuation in itertools.product(range(vocab_size), repeat=3):
        tokens, probability = list(prompt), 1.0
        for token in continuation:
            logits = table[context_row(tokens, len(tokens) - 1, vocab_size)].astype(np.float64) / temperature
            weights = np.exp(logits - logits.max())
            probability *= weights[token] / weights.sum()
            tokens.append(token)
        probs[continuation] = probability
    return probs


# For 27 continuations; the wrong distribution below is told from so many. Keys: of the seed.
NUM_SAMPLES, SEED = pick((1000, 8), (5000, 7))


SOME = [  # every drafter and every kind of policy
    ("price:prune=off", "model", 2),
    ("free:3", "model", 2),
    ("fixed:3", "head", 3),
    ("fixed:4", "medusa", 1),
    ("erratic", "suffix,model", 2),
    ("price:prune=on", "model", 0),
    ("price:prune=on", "model of a mixture", 0),
    ("erratic", "head", 0),
    ("fixed:3:draft_ahead", "medusa", 0),
    ("fixed:3:ping_pong", "suffix,head", 0),
    ("fixed:3", "suffix", 0),
    ("erratic", "block", 0),
    ("erratic", "foreign", 0),
]

CHAINS = [
    *(
        (policy, "model")
        for policy in (
            "fixed:1",
            "fixed:3",
            "fixed:2:draft_ahead",
            "fixed:3:ping_pong",
            "erratic",
            "price:prune=on",
        )
    ),
    ("price:prune=on", "model of a mixture"),
    *((policy, "suffix") for policy in ("fixed:3", "fixed:3:draft_ahead")),
    *((policy, "foreign") for policy in ("fixed:3", "fixed:3:draft_ahead", "erratic")),
    *((policy, "head") for policy in ("fixed:3", "fixed:3:draft_ahead", "erratic")),
    *((policy, "medusa") for policy in ("fixed:4", "fixed:3:draft_ahead", "erratic")),
    *((policy, "block") for policy in ("fixed:3", "fixed:3:draft_ahead", "erratic")),
    ("fixed:3:ping_pong", "suffix,medusa"),
    ("fixed:3:ping_pong", "suffix,block"),
    *((policy, "suffix,head") for policy in ("fixed:3:ping_pong", "price:prune=on")),
    *((policy, "suffix,model") for policy in ("fixed:3", "fixed:3:ping_pong", "erratic", "price:prune=on")),
]


@pytest.mark.parametrize(
    ("policy", "drafters", "num_branches"),
    pick(
        SOME,
        [
            *((policy, "model", 2) for policy in ("fixed:2", "fixed:3", "free:3", "erratic", "price:prune=off")),
            ("fixed:3", "head", 3),
            ("fixed:4", "medusa", 1),
            ("erratic", "suffix,model", 2),
            *((*chain, 0) for chain in CHAINS),
        ],
    ),
)
def test_unseeded_sampling_has_the_targets_distribution(policy, drafters, num_branches, monkeypatch):
    """Chi-square over all continuations of three tokens; the keys are fixed, so the outcome is too."""
    keys = np.random.default_rng(SEED)
    monkeypatch.setattr("os.urandom", lambda n: keys.bytes(n))
    drafters, _, is_mixture = drafters.partition(" of ")
    setup = Setup(
        vocab_size=3,
        table_seed=11,
        noise=1.5,
        policy=policy,
        drafters=drafters,
        is_mixture=bool(is_mixture),
        num_branches=num_branches,
        max_batch_size=2 if policy.startswith("price") else 64,  # where drafting pays
        max_num_tokens=400,
        num_blocks=16 if policy.startswith("price") else 512,
    )
    prompt, num_requests = [1, 2, 0, 1, 2, 0], NUM_SAMPLES  # it repeats, so the suffix drafts from the first token on
    params = SamplingParams(max_tokens=6, temperature=1.3)
    result = run(setup, [(prompt, params)] * num_requests)
    seen = Counter(tuple(tokens[:3]) for tokens in result.tokens.values())
    probs = _probs_of_three(setup.target.table, prompt, 1.3)
    accepted = sum(r.stats.num_accepted_tokens for r in result.requests.values())
    drafted = sum(r.stats.num_draft_tokens for r in result.requests.values())
    assert 0.1 * drafted < accepted < 0.95 * drafted, "both accepts and rejects must occur for this to test anything"
    expected = np.array([probs[c] * num_requests for c in sorted(probs)])
    observed = np.array([seen[c] for c in sorted(probs)])
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_the_chi_square_notices_a_wrong_distribution():
    """The same test on the draft's distribution fails, so passing means something."""
    setup = Setup(vocab_size=3, table_seed=11, noise=1.5)
    target, draft = setup.make_tables()
    probs, wrong = _probs_of_three(target, [1, 2, 0], 1.3), _probs_of_three(draft, [1, 2, 0], 1.3)
    expected = np.array([probs[c] * NUM_SAMPLES for c in sorted(probs)])
    observed = np.array([wrong[c] * NUM_SAMPLES for c in sorted(probs)])
    assert stats.chisquare(observed, expected).pvalue < 1e-6


@pytest.mark.parametrize("drafters", ["model", "head", "medusa", "block"])
def test_preemption_happens_and_changes_nothing(drafters):
    setup = Setup(
        drafters=drafters,
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
@pytest.mark.parametrize("is_mixture", [False, True])
def test_rows_are_pruned_inside_a_pass_and_nothing_changes(policy, is_mixture):
    setup = Setup(policy=policy, noise=1.5, max_num_tokens=64, max_seq_len=64, is_mixture=is_mixture)
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
