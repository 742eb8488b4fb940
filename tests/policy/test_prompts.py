"""Prompts beside steps that commit more or fewer tokens: as many rows per token, in pieces as large as before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.policy.base import PlanStats
from faser_trtllm.policy.prompts import Prompts


def step(num_tokens, prompt_rows, steps=1):
    return PlanStats(steps, steps * 10.0, 0.0, 0.0, num_tokens=steps * num_tokens, num_context_rows=steps * prompt_rows)


def prompts_of(*steps):
    prompts = Prompts()
    for stats in steps:
        prompts.observe(stats)
    return prompts


def test_there_are_none_at_first():
    assert Prompts().shares(10.0) == {}
    assert Prompts().rows_per_token == 0.0


def test_as_many_tokens_bring_as_many_prompts():
    shares = prompts_of(*[step(8, 0), step(8, 0), step(8, 0), step(8, 512)] * 16).shares(8.0)
    assert shares == pytest.approx({512: 0.25})


def test_twice_the_tokens_bring_prompts_twice_as_often():
    shares = prompts_of(*[step(8, 0), step(8, 0), step(8, 0), step(8, 512)] * 16).shares(16.0)
    assert shares == pytest.approx({512: 0.5})


def test_prompts_grow_where_every_step_has_some():
    shares = prompts_of(*[step(8, 0), step(8, 512)] * 32).shares(32.0)
    assert shares == pytest.approx({1024: 1.0})


def test_prompts_grow_to_what_a_pass_has_room_for():
    """A burst of short requests after long prompts: 64 times the tokens of one stream, in no pass of a million rows."""
    prompts = prompts_of(*[step(1, 4096)] * 64)
    assert prompts.shares(576.0, most_rows=8192) == pytest.approx({8192: 1.0})
    assert prompts.shares(576.0, most_rows=100) == pytest.approx({4096: 1.0})


def test_old_steps_are_forgotten():
    prompts = prompts_of(step(8, 512, steps=64), step(8, 0, steps=200))
    assert prompts.shares(8.0) == {}


@given(
    st.lists(st.tuples(st.integers(1, 64), st.sampled_from([0, 0, 64, 512, 700])), min_size=64, max_size=80),
    st.floats(1.0, 400.0),
)
def test_rows_per_token_stay(steps, num_tokens):
    prompts = prompts_of(*(step(*each) for each in steps))
    shares = prompts.shares(num_tokens)
    assert all(share > 0.0 for share in shares.values())
    assert sum(shares.values()) <= 1.0 + 1e-9
    rows = sum(share * rows for rows, share in shares.items())
    assert rows == pytest.approx(num_tokens * prompts.rows_per_token, rel=1e-6, abs=0.5 * sum(shares.values()) + 1e-6)
