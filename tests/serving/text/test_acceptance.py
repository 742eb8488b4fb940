"""Tests of the record of a request's drafts by step: as aiperf checks it, over real executors and by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.plan import OutputEnd, RequestOutput
from faser_trtllm.core.request import FinishReason
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.serving.text.acceptance import AcceptanceLog
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.effort import examples
from tests.support.executor_harness import STEP_S
from tests.support.random_setups import prompts, setups
from tests.support.scripted_text import ScriptExecutor


@settings(max_examples=examples(100))
@given(setup=setups(), data=st.data())
def test_every_draft_and_every_accepted_token_is_in_one_step(setup, data):
    logs, ends = {}, {}

    def sink(name):
        logs[name] = AcceptanceLog()

        def take(output):
            logs[name].add(output.request.stats.copy(), len(output.new_token_ids))
            if output.finish_reason is not None:
                ends[name] = output.request
            return False

        return take

    with setup.open() as executor:
        for number in range(data.draw(st.integers(1, 4))):
            params = SamplingParams(max_tokens=data.draw(st.integers(1, 25)))
            executor.submit(str(number), data.draw(prompts), params, sink(str(number)))
        for _ in range(20_000):
            if not executor.step():
                break
            setup.clock.advance(STEP_S)
    assert ends.keys() == logs.keys()
    for name, request in ends.items():
        found = logs[name].result(request.max_draft_len)
        assert len(found.histogram) == request.max_draft_len + 1
        assert sum(found.histogram) == len(found.drafted) == len(found.accepted) <= request.stats.num_steps
        assert sum(j * count for j, count in enumerate(found.histogram)) == sum(found.accepted)
        assert all(0 <= accepted <= drafted for accepted, drafted in zip(found.accepted, found.drafted, strict=True))
        assert sum(found.accepted) == request.stats.num_accepted_tokens
        assert sum(found.drafted) == request.stats.num_draft_tokens


class Script:
    """A request whose steps are told by hand: tokens, drafts made, drafts that wait, and accepted ones."""

    def __init__(self, tokenizer, **fields):
        self.executor, self.outputs = ScriptExecutor(), []
        request = TextRequest(text="hello", max_tokens=50, return_acceptance=True, **fields)
        TextGenerator(self.executor, tokenizer).submit("r", request, self.outputs.append)

    def step(self, tokens, made, waiting, accepted, reason=None):
        request = self.executor.request
        request.stats.num_draft_tokens += made
        request.num_drafts = waiting
        request.stats.num_accepted_tokens += accepted
        request.stats.num_steps += 1
        return self.executor.sink(RequestOutput(request, tuple(tokens), reason))

    @property
    def result(self):
        assert all(output.acceptance is None for output in self.outputs[:-1])
        found = self.outputs[-1].acceptance
        return list(found.drafted), list(found.accepted)


def test_a_draft_counts_in_the_step_that_settles_it(tokenizer):
    script = Script(tokenizer)
    script.step([65], 0, 0, 0)
    script.step([66, 67], 4, 2, 2)  # two pass, two wait
    script.step([68, 69], 1, 0, 1)  # of three that are there one passes, one is rejected, and one dropped
    script.step([70], 0, 0, 0)
    script.step([71], 3, 0, 0, FinishReason.LENGTH)
    assert script.result == ([2, 3, 3], [2, 1, 0])


def test_what_a_stop_word_cuts_off_is_not_accepted(tokenizer):
    ids = tokenizer.encode("one END two", add_special_tokens=False)
    kept = len(tokenizer.encode("one ", add_special_tokens=False))
    script = Script(tokenizer, stop_words=("END",))
    assert script.step(ids, len(ids), 0, len(ids) - 1)
    assert script.result == ([kept + len("END")], [kept]), "drafts after the stop word were not tested"


def test_drafts_of_a_request_that_is_cancelled_are_not_a_step(tokenizer):
    script = Script(tokenizer)
    script.step([66, 67], 4, 2, 2)
    request = script.executor.request
    request.num_drafts = 0
    script.executor.sink(RequestOutput(request, (), FinishReason.CANCELLED))
    assert script.result == ([2], [2])


def test_nobody_counts_unless_asked(tokenizer):
    executor, outputs = ScriptExecutor(), []
    TextGenerator(executor, tokenizer).submit("r", TextRequest(text="hello"), outputs.append)
    executor.sink(RequestOutput(executor.request, (65,), FinishReason.LENGTH))
    assert outputs[-1].acceptance is None


@pytest.mark.parametrize(
    ("made", "waiting", "accepted", "counted"),
    [
        (10, 0, 10, (7, 6)),  # the seventh token completes the word
        (10, 3, 6, (7, 6)),  # and was drawn: what waits after it is not counted
        (4, 0, 4, (4, 4)),
        (10, 0, 6, (10, 6)),  # a draft was rejected there, and three were dropped with it
    ],
)
def test_statistics_end_with_the_stop_word(tokenizer, made, waiting, accepted, counted):
    ids = tokenizer.encode("one END two", add_special_tokens=False)
    script = Script(tokenizer, stop_words=("END",))
    script.step([65, 66], 2, 0, 1)
    end = script.step(ids, made, waiting, accepted)
    assert end == OutputEnd(2 + 7, 2 + counted[0], 1 + counted[1])
    found = script.outputs[-1].statistics
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (2 + counted[0], 1 + counted[1])
