"""Token trees: what branches bring, what a row behind one sees, and who gets none. That they change no text is drawn at
random in test_exactness.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from faser_trtllm.core.decision import Mode
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.stats import StepWatcher
from tests.support.executor_harness import Collector, ErraticPolicy, Setup
from tests.support.executor_harness import run as run_all

NUM_REQUESTS = 12


def run(policy, num_branches, params, watch=None, **fields):
    """Texts and statistics of some requests at once."""
    setup = Setup(
        vocab_size=5,
        noise=1.5,
        policy=policy,
        num_branches=num_branches,
        max_batch_size=4,
        max_num_tokens=fields.pop("max_num_tokens", 128),
        num_blocks=512,
        **fields,
    )
    collector = Collector()
    with setup.open() as executor:
        if watch is not None:
            executor.watch(watch)
        for number in range(NUM_REQUESTS):
            prompt = [number % 5, number // 5, 1]
            executor.submit(str(number), prompt, params(number), collector.sink(str(number)))
        while executor.step():
            executor.check_integrity()
        statistics = executor.stats()
    return collector.tokens, statistics


def greedy(number):
    return SamplingParams(max_tokens=40)


def seeded(number):
    """Return params under which earlier tokens affect later ones."""
    words = tuple((a, b) for a in range(5) for b in range(a, 5, 2))
    return SamplingParams(max_tokens=40, temperature=1.0, seed=number, repetition_penalty=2.5, bad_words=words)


@pytest.mark.parametrize("params", [greedy, seeded])
@pytest.mark.parametrize("num_branches", [1, 3])
def test_a_branch_that_was_right_brings_a_token(params, num_branches):
    alone, _ = run("off", 0, params)
    chain, of_chain = run("free:3", 0, params, doubtful=False)
    tree, of_tree = run("free:3", num_branches, params, doubtful=False)
    assert tree == chain == alone
    assert of_chain["num_branch_rows"] == 0
    assert 0 < of_tree["num_branch_tokens"] < of_tree["num_branch_rows"]
    assert of_tree["num_steps"] < of_chain["num_steps"]
    assert of_tree["num_rows"] > of_tree["num_branch_rows"]


class RowCounter(StepWatcher):
    """Watches an executor: rows that pending drafts had room for, and those of drafts and branches."""

    def __init__(self):
        self.rows = []

    def step(self, record):
        rows = record.plan.scheduled
        room = np.minimum(rows.num_pending + record.drafts.num_new_drafts, rows.max_verified).sum()
        self.rows.append((room, record.num_verified + record.result.num_branches))


@pytest.mark.parametrize("params", [greedy, seeded])
def test_without_prices_a_branch_takes_the_row_of_a_draft(params):
    alone, _ = run("off", 0, params)
    counter = RowCounter()
    tree, statistics = run("fixed:3", 3, params, watch=counter)
    assert tree == alone
    assert 0 < statistics["num_branch_tokens"] < statistics["num_branch_rows"]
    assert all(had == wanted for wanted, had in counter.rows)


def test_branches_take_no_more_rows_than_there_are():
    """Four requests with three drafts leave one of 17 rows."""
    _, statistics = run("free:3", 3, greedy, max_num_tokens=17)
    assert statistics["num_branch_rows"] > 0  # some had fewer drafts
    assert statistics["num_rows"] <= 17 * statistics["num_steps"]


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        ("fixed:3:ping_pong", greedy),
        ("fixed:3:draft_ahead", greedy),
        ("fixed:3", lambda number: SamplingParams(max_tokens=40, return_log_probs=True)),
    ],
)
def test_overlapped_steps_and_kept_rows_have_chains(policy, params):
    alone, _ = run("off", 0, params)
    tree, statistics = run(policy, 3, params)
    assert tree == alone
    assert statistics["num_branch_rows"] == 0


def test_a_branch_costs_what_price_says():
    """Where a row costs a stair of its own, price buys none that it does not expect to pay."""
    _, of_price = run("price:prune=off", 3, greedy)
    _, of_free = run("free:3", 3, greedy)
    bought, had = (statistics["num_branch_rows"] / statistics["num_steps"] for statistics in (of_price, of_free))
    assert bought < had / 2


@dataclass
class SerialSetup(Setup):
    """Every step may have branches, and many leave drafts pending."""

    def make_policy(self):
        return ErraticPolicy(self.max_draft_len, self.policy_seed, modes=(Mode.SERIAL,))


@pytest.mark.parametrize("seed", range(10))
def test_a_preempted_request_gets_none_before_its_drafts_have_blocks_again(seed):
    """Each token has a block of its own here, so that a branch's place would be in one that is not the request's."""
    sizes = {"tokens_per_block": 1, "num_blocks": 64, "capacity": "MAX_UTILIZATION", "policy_seed": seed}
    setup = SerialSetup(noise=1.5, policy="erratic", num_branches=3, **sizes)
    requests = [([number % 5, number // 5, seed % 5], greedy(number)) for number in range(8)]
    collector = run_all(setup, requests)
    assert sum(request.stats.num_preemptions for request in collector.requests.values()) > 0
    alone = run_all(Setup(), requests)
    assert collector.tokens == alone.tokens


def test_without_a_draft_model_there_are_none_to_branch_from():
    with pytest.raises(ConfigError, match=r"num_branches is 2, .* set it to 0"):
        run("fixed:3", 2, greedy, drafters="suffix")
