import pytest

from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.policy.base import StepView
from faser_trtllm.policy.registry import make_policy


def _view(n):
    requests = [Request(str(i), [1], SamplingParams(), max_seq_len=32, max_draft_len=8) for i in range(n)]
    return StepView(requests, 0, 0, 0.0)


def test_fixed_wants_the_same_length_everywhere():
    policy = make_policy("fixed:3", max_draft_len=8)
    assert policy.plan(_view(2)).lengths == [3, 3]
    assert policy.frontier_lengths(_view(2), [3, 1]) == [3, 1]
    assert policy.name == "fixed:3"


@pytest.mark.parametrize("spelling", ["off", "fixed:0"])
def test_off_drafts_nothing_but_uses_up_what_is_pending(spelling):
    policy = make_policy(spelling, max_draft_len=8)
    assert policy.plan(_view(2)).lengths == [0, 0]
    assert policy.frontier_lengths(_view(2), [0, 2]) == [0, 2]


@pytest.mark.parametrize("spelling", ["", "fixed", "fixed:", "fixed:-1", "fixed:x", "on", "off:1", "price"])
def test_unknown_spellings_are_refused_with_what_is_allowed(spelling):
    with pytest.raises(ConfigError, match="off, fixed:K"):
        make_policy(spelling, max_draft_len=8)


def test_a_length_beyond_what_was_built_names_both_numbers_and_the_fix():
    with pytest.raises(ConfigError, match=r"fixed:9.*max_draft_len 8.*--max_draft_len 9"):
        make_policy("fixed:9", max_draft_len=8)
