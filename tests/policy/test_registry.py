import pytest

from faser_trtllm.errors import ConfigError
from faser_trtllm.policy.base import Mode, StepView
from faser_trtllm.policy.registry import check_spelling, make_policy, may_overlap, needs_costs
from tests.policy.world import cost_table, request


def _view(n):
    return StepView([request(str(i), slot=i) for i in range(n)], 0, 0, 0.0)


def test_fixed_wants_the_same_length_everywhere():
    policy = make_policy("fixed:3", max_draft_len=8)
    assert policy.plan(_view(2)).lengths == [3, 3]
    assert policy.plan(_view(2)).verification is None
    assert policy.name == "fixed:3"
    assert make_policy("fixed:3,mode=ping_pong", max_draft_len=8).plan(_view(2)).mode is Mode.PING_PONG


@pytest.mark.parametrize("spelling", ["off", "fixed:0"])
def test_off_drafts_nothing_but_uses_up_what_is_pending(spelling):
    policy = make_policy(spelling, max_draft_len=8)
    assert policy.plan(_view(2)).lengths == [0, 0]
    assert policy.plan(_view(2)).verification is None


@pytest.mark.parametrize(
    "spelling", ["", "fixed", "fixed:", "fixed:-1", "fixed:x", "fixed:²", "on", "off:1", "gp_lcb:1", "prices"]
)
def test_unknown_spellings_are_refused_with_what_is_allowed(spelling):
    with pytest.raises(ConfigError, match="off, fixed:K"):
        make_policy(spelling, max_draft_len=8)


def test_a_length_beyond_what_was_built_names_both_numbers_and_the_fix():
    with pytest.raises(ConfigError, match=r"fixed:9.*max_draft_len 8.*--max_draft_len 9"):
        make_policy("fixed:9", max_draft_len=8)


@pytest.mark.parametrize("spelling", ["schedule", "price", "price:mode=serial"])
def test_a_policy_that_needs_costs_names_the_command_that_makes_them(spelling):
    assert needs_costs(spelling)
    with pytest.raises(ConfigError, match="faser profile"):
        make_policy(spelling, max_draft_len=8)


@pytest.mark.parametrize("spelling", ["schedule", "gp_lcb", "price", "price:mode=serial,prune=off", "price:prune=on"])
def test_every_spelling_plans_for_no_one_and_for_many(spelling):
    policy = make_policy(spelling, 8, cost_table(), 32)
    assert policy.name == spelling.partition(":")[0]
    for n in (0, 1, 7, 32):
        assert len(policy.plan(_view(n)).lengths) == n


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("price:speed=9", "'speed' is none of: prune, mode"),
        ("price:mode=fast", "mode is 'fast' but must be one of: auto, serial"),
        ("price:prune", "prune is ''"),
        ("schedule:prune=on", "allowed is one of"),
        ("fixed:2,mode=auto", "must be one of: serial"),
    ],
)
def test_options_are_checked(spelling, says):
    with pytest.raises(ConfigError, match=says):
        make_policy(spelling, 8, cost_table(), 32)


def test_a_forced_mode_is_used_where_it_drafts():
    policy = make_policy("price:mode=draft_ahead", 8, cost_table(), 32)
    assert policy.plan(_view(1)).mode is Mode.DRAFT_AHEAD


def test_a_spelling_is_checked_without_a_cost_table():
    for spelling in ("off", "fixed:2", "schedule", "gp_lcb", "price:mode=serial,prune=off"):
        check_spelling(spelling, 8)
    for spelling in ("price:mode=fast", "schedule:x", "fixed:9", "nothing"):
        with pytest.raises(ConfigError, match="speculation is"):
            check_spelling(spelling, 8)


@pytest.mark.parametrize(
    ("spelling", "overlaps"),
    [
        ("auto", False),
        ("price", False),
        ("fixed:4", False),
        ("price:mode=serial,prune=off", False),
        ("price:mode=auto", True),
        ("price:prune=off,mode=ping_pong", True),
        ("fixed:4,mode=draft_ahead", True),
    ],
)
def test_lanes_are_only_there_for_who_asks_for_them(spelling, overlaps):
    assert may_overlap(spelling) == overlaps
