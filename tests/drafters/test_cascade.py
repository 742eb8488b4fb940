"""Who drafts what: the text itself, the draft model, or both, and what is counted of it."""

from dataclasses import replace

import pytest

from faser_trtllm.config import DrafterName, ExecutorConfig, parse
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from lab.clock import ManualClock
from tests.drafters.driving import drive
from tests.support.executor_harness import Setup
from tests.support.random_setups import greedy_reference
from tests.support.toy_engine import make_table

PROMPTS = [[1, 2, 3], [4, 0, 4, 0], [2, 1]]
REQUESTS = [(prompt, SamplingParams(max_tokens=50)) for prompt in PROMPTS]


@pytest.mark.parametrize("drafters", ["model", "suffix", "suffix,model"])
def test_tests_are_counted_by_who_drafted(drafters):
    tokens, stats = drive(Setup(policy="fixed:3", drafters=drafters), REQUESTS)
    names = drafters.split(",")
    passed = {name: stats[f"num_passed_drafts_{name}"] for name in names}
    tested = {name: stats[f"num_tested_drafts_{name}"] for name in names}
    assert all(0 < passed[name] <= tested[name] for name in names)
    assert sum(passed.values()) == stats["num_accepted_tokens"]
    assert (stats["num_tested_drafts_suffix"] > 0) == ("suffix" in names)
    target = make_table(5, 0)
    assert list(tokens.values()) == [greedy_reference(target, prompt, 50) for prompt in PROMPTS]


class TickingClock(ManualClock):
    """Every look at it takes a millisecond."""

    def now_s(self):
        self.advance(0.001)
        return super().now_s()


@pytest.mark.parametrize("drafters", ["model", "suffix", "suffix,model"])
def test_time_is_counted_by_who_drafted(drafters):
    _, stats = drive(Setup(policy="fixed:3", drafters=drafters, make_clock=TickingClock), REQUESTS)
    spent = {"model": stats["draft_ms"], "suffix": stats["free_draft_ms"]}
    assert {name for name, ms in spent.items() if ms > 0} == set(drafters.split(","))


@pytest.mark.parametrize("only", ["model", "suffix"])
def test_a_request_says_who_may_draft_for_it(only):
    requests = [(prompt, SamplingParams(max_tokens=50, drafters=(only,))) for prompt in PROMPTS]
    tokens, stats = drive(Setup(policy="fixed:3", drafters="suffix,model"), requests)
    other = {"model": "suffix", "suffix": "model"}[only]
    assert stats[f"num_tested_drafts_{only}"] > 0
    assert stats[f"num_tested_drafts_{other}"] == 0
    assert list(tokens.values()) == [greedy_reference(make_table(5, 0), prompt, 50) for prompt in PROMPTS]


def test_who_does_not_draft_here_is_refused_by_name():
    executor = Setup(policy="fixed:3", drafters="suffix").open()
    with executor, pytest.raises(InvalidArgumentError, match="drafters has 'model', this server drafts with suffix;"):
        executor.submit("a", [1], SamplingParams(drafters=("suffix", "model")), lambda output: False)
    off = Setup(policy="off").open()
    with off:
        off.submit("a", [1], SamplingParams(drafters=("model",)), lambda output: False)


def test_where_the_text_repeats_the_draft_model_rests():
    """A target that goes round in circles: its text alone tells all, so hardly a draft is the model's."""
    _, alone = drive(Setup(policy="fixed:3", drafters="model", table_seed=2, noise=3.0), REQUESTS)
    _, both = drive(Setup(policy="fixed:3", drafters="suffix,model", table_seed=2, noise=3.0), REQUESTS)
    assert both["num_passed_drafts_suffix"] > 2 * both["num_tested_drafts_model"] > 0
    assert both["num_steps"] < alone["num_steps"]


def test_a_plan_may_rest_the_draft_model_alone():
    """An empty model_lengths: drafts go on for nothing, and the draft model does not even read the prompt."""
    setup = Setup(policy="fixed:3", drafters="suffix,model", reuse=False)
    make_policy = setup.make_policy

    class ModelRests:
        name = "fixed:3"

        def __init__(self):
            self._inner = make_policy()

        def plan(self, view):
            return replace(self._inner.plan(view), model_lengths={})

        def observe(self, stats):
            pass

    setup.make_policy = ModelRests
    tokens, stats = drive(setup, REQUESTS)
    assert stats["num_passed_drafts_suffix"] > 0
    assert stats["num_tested_drafts_model"] == 0
    assert setup.draft.num_forwards == 0
    assert tokens["0"] == greedy_reference(setup.target.table, PROMPTS[0], 50)


@pytest.mark.parametrize("value", ["ngram", [], [""], ["suffix", "suffix"], 3, {"suffix": 1}])
def test_other_drafters_are_refused(value):
    with pytest.raises(ConfigError, match="drafters"):
        parse(ExecutorConfig, {"drafters": value})


@pytest.mark.parametrize("value", ["suffix, model", ["suffix", "model"]])
def test_drafters_are_a_list_or_a_line(value):
    assert parse(ExecutorConfig, {"drafters": value}).drafters == (DrafterName.SUFFIX, DrafterName.MODEL)
