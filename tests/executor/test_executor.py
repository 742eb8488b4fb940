"""The executor's front: submitting, cancelling, draining, limits, and models that return NaN."""

import threading
import time

import numpy as np
import pytest

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.policy.base import Decision, StatelessPolicy
from tests.support.executor_harness import Collector, Setup, run
from tests.support.random_setups import greedy_reference
from tests.support.waiting import PATIENCE_S, wait_until


def start(setup: Setup):
    executor = setup.open()
    return executor, Collector()


def finish(executor):
    for _ in range(2000):
        if not executor.step():
            return
        executor.check_integrity()
    raise AssertionError("the executor does not come to an end")


def test_step_is_false_when_there_is_nothing_to_do():
    executor, collector = start(Setup())
    assert executor.step() is False
    executor.submit("a", [1, 2], SamplingParams(max_tokens=2), collector.sink("a"))
    assert executor.step() is True
    finish(executor)
    assert len(collector.tokens["a"]) == 2


def test_what_sinks_got_is_handed_over_before_the_next_pass_or_at_once_if_there_is_none():
    setup = Setup(segmented=False)
    executor, events = setup.open(), []
    forward = setup.target.forward
    setup.target.forward = lambda batch: events.append("pass") or forward(batch)
    executor.before_pass(lambda: events.append("hand over"))
    params = SamplingParams(max_tokens=3)
    executor.submit("a", [1, 2], params, lambda output: bool(events.append("sink")))
    assert [executor.step() for _ in range(3)] == [True] * 3
    step = ["hand over", "pass", "sink"]
    assert events == [*step, *step, *step, "hand over"]
    events.clear()
    executor.submit("b", [1, 2], params, lambda output: bool(events.append("sink")))
    executor.cancel("b")
    assert executor.step() is False
    assert events == ["sink", "hand over"]
    events.clear()
    executor.submit("c", [1, 2], params, lambda output: bool(events.append("sink")))
    executor.close()
    assert events == ["sink", "hand over"]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([0, 5], SamplingParams(), r"token id 5, the vocabulary has ids 0 to 4"),
        ([-1], SamplingParams(), r"token id -1, the vocabulary has ids 0 to 4"),
        ([1] * 64, SamplingParams(), r"the prompt has 64 tokens, the engine takes at most 63"),
        ([1], SamplingParams(max_tokens=0), r"max_tokens is 0, allowed is 1 or more"),
        ([1], SamplingParams(min_tokens=17), r"min_tokens is 17, allowed is 0 to max_tokens"),
        ([1], SamplingParams(temperature=float("nan")), r"temperature is nan"),
        ([1], SamplingParams(temperature=float("inf")), r"temperature is inf"),
        ([1], SamplingParams(temperature=-1.0), r"temperature is -1.0"),
        ([1], SamplingParams(top_p=0.0), r"top_p is 0.0, allowed is more than 0"),
        ([1], SamplingParams(top_p=1.5), r"top_p is 1.5"),
        ([1], SamplingParams(top_k=-1), r"top_k is -1"),
        ([1], SamplingParams(min_p=1.0), r"min_p is 1.0"),
        ([1], SamplingParams(seed=-1), r"seed is -1"),
        ([1], SamplingParams(seed=2**64), r"seed is 18446744073709551616"),
        ([1], SamplingParams(repetition_penalty=0.0), r"repetition_penalty is 0.0"),
        ([1], SamplingParams(presence_penalty=float("inf")), r"presence_penalty is inf"),
        ([1], SamplingParams(frequency_penalty=float("nan")), r"frequency_penalty is nan"),
        ([1], SamplingParams(num_draft_tokens=-2), r"num_draft_tokens is -2"),
        ([1], SamplingParams(end_ids=(9,)), r"end_id holds token id 9"),
        ([1], SamplingParams(bad_words=((7,),)), r"bad_words holds token id 7"),
        ([1], SamplingParams(bad_words=((),)), r"bad_words holds an empty word"),
        ([1], SamplingParams(logit_bias=((1, float("nan")),)), r"logit_bias of token 1 is nan"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence_and_leave_nothing(prompt, params, message):
    executor, collector = start(Setup())
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        executor.submit("a", prompt, params, collector.sink("a"))
    assert "\n" not in str(caught.value)
    assert executor.step() is False
    executor.submit("a", [1], SamplingParams(max_tokens=1), collector.sink("a"))
    finish(executor)


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    executor, collector = start(Setup())
    executor.submit("a", [1], SamplingParams(max_tokens=2), collector.sink("a"))
    with pytest.raises(InvalidArgumentError, match="already in use"):
        executor.submit("a", [1], SamplingParams(max_tokens=2), collector.sink("b"))
    finish(executor)
    executor.submit("a", [1], SamplingParams(max_tokens=2), collector.sink("c"))
    finish(executor)
    assert collector.tokens["c"] == collector.tokens["a"]


def test_a_full_queue_is_unavailable_not_an_error_of_the_request():
    executor, collector = start(Setup(max_queue_size=2))
    for name in "ab":
        executor.submit(name, [1], SamplingParams(), collector.sink(name))
    with pytest.raises(UnavailableError, match="Maximum queue size of 2 has been reached, please try again later"):
        executor.submit("c", [1], SamplingParams(), collector.sink("c"))


def test_one_client_leaves_room_in_the_queue_for_others():
    """A client may take half of what the others leave; requests without a client key may fill the queue."""
    executor, collector = start(Setup(max_queue_size=16, max_batch_size=2))

    def submit(key):
        name = str(len(submitted))
        params = SamplingParams(max_tokens=3, client_key=key)
        executor.submit(name, [1, 2], params, collector.sink(name))
        submitted.append(key)

    submitted = []
    for key, limit in (("a", 8), ("b", 4), ("c", 2)):
        for _ in range(limit):
            submit(key)
        with pytest.raises(
            UnavailableError, match=rf"the client has {limit} unfinished requests, but .* max_queue_size \(16\); try"
        ):
            submit(key)
    submit("")
    submit("")
    with pytest.raises(UnavailableError, match="Maximum queue size of 16"):
        submit("")
    while executor.step():
        pass
    submit("a")
    assert collector.reasons == dict.fromkeys(map(str, range(16)), "length")
    executor.close()


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_cancel_is_heard_within_a_step_and_frees_the_slot(num_steps):
    executor, collector = start(Setup(policy="fixed:3"))
    executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=60), collector.sink("a"))
    executor.submit("b", [1, 2, 3], SamplingParams(max_tokens=20), collector.sink("b"))
    for _ in range(num_steps):
        executor.step()
    executor.cancel("a")
    executor.cancel("unknown")
    before = len(collector.tokens["a"])
    executor.step()
    assert collector.reasons["a"] == "cancelled"
    assert len(collector.tokens["a"]) == before
    executor.check_integrity()
    finish(executor)
    assert collector.reasons["b"] == "length"
    stats = executor.stats()
    assert stats["kv_num_free_blocks"] == stats["kv_num_blocks"]


def test_a_sink_ends_its_request_by_returning_true():
    executor, _ = start(Setup(policy="fixed:3"))
    seen = []

    def sink(output):
        seen.append(output)
        return sum(len(o.new_token_ids) for o in seen) >= 5

    executor.submit("a", [1, 2], SamplingParams(max_tokens=40), sink)
    finish(executor)
    assert sum(len(o.new_token_ids) for o in seen[:-1]) < 5
    assert seen[-1].finish_reason is None
    assert seen[-1].request.finish_reason.value == "stop"


def test_a_failing_sink_takes_only_its_own_request_down():
    executor, collector = start(Setup())

    def broken(output):
        raise RuntimeError("client went away")

    executor.submit("a", [1, 2], SamplingParams(max_tokens=40), broken)
    executor.submit("b", [1, 2], SamplingParams(max_tokens=10), collector.sink("b"))
    finish(executor)
    assert len(collector.tokens["b"]) == 10
    assert executor.stats()["num_finished_requests"] == 2


def _poisoned(table, rows_from):
    table = table.copy()
    table[rows_from::7] = np.nan
    return table


def test_nan_of_the_target_fails_that_request_only():
    setup = Setup(policy="fixed:3")
    target, draft = setup.make_tables()
    clean, _ = setup.make_tables()
    poisoned = target.copy()
    poisoned[: len(target) // 5] = np.nan  # contexts whose third-last token is 0
    setup.tables = (poisoned, draft)
    requests = [([0, 1, 2], SamplingParams(max_tokens=8)), ([4, 3, 4], SamplingParams(max_tokens=2))]
    expected = greedy_reference(clean, [4, 3, 4], 2)
    assert 0 not in [4, 3, 4, *expected][:4]
    result = run(setup, requests)
    assert result.reasons["0"] == "error"
    assert "NaN" in result.requests["0"].error
    assert result.tokens["1"] == expected


def test_nan_of_the_draft_costs_drafts_but_not_the_text():
    setup = Setup(policy="fixed:4")
    target, draft = setup.make_tables()
    setup.tables = (target, _poisoned(draft, 3))
    result = run(setup, [([1, 2, 3], SamplingParams(max_tokens=40))])
    assert result.tokens["0"] == greedy_reference(target, [1, 2, 3], 40)


def test_if_every_token_is_banned_the_request_ends_with_length():
    result = run(Setup(), [([1], SamplingParams(max_tokens=5, bad_words=tuple((i,) for i in range(5))))])
    assert result.tokens["0"] == []
    assert result.reasons["0"] == "length"


def test_threads_submit_and_cancel_while_it_runs():
    setup = Setup(policy="fixed:3", max_batch_size=4)
    executor, collector = setup.open(), Collector()
    done = {name: threading.Event() for name in map(str, range(60))}

    def sink(name):
        collect = collector.sink(name)

        def wrapped(output):
            collect(output)
            if output.finish_reason is not None:
                done[name].set()
            return False

        return wrapped

    def client(first):
        for name in map(str, range(first, 60, 3)):
            executor.submit(name, [int(name) % 5, 1], SamplingParams(max_tokens=30), sink(name))
            if int(name) % 4 == 0:
                executor.cancel(name)

    executor.start()
    threads = [threading.Thread(target=client, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(event.wait(PATIENCE_S) for event in done.values())
    assert executor.drain(5.0)
    with pytest.raises(UnavailableError, match="shutting down"):
        executor.submit("late", [1], SamplingParams(), collector.sink("late"))
    executor.check_integrity()
    executor.close()
    for name, reason in collector.reasons.items():
        if reason == "length":
            assert collector.tokens[name] == greedy_reference(setup.target.table, [int(name) % 5, 1], 30)
    assert list(collector.reasons.values()).count("length") >= 45


def test_drain_reports_what_did_not_finish_and_close_cancels_it():
    executor, collector = start(Setup())
    executor.submit("a", [1], SamplingParams(max_tokens=5), collector.sink("a"))
    assert executor.drain(0.05) is False  # nobody runs step()
    executor.close()
    executor.close()
    assert collector.reasons["a"] == "cancelled"


def test_preempted_and_late_requests_are_timed_by_their_deadline():
    setup = Setup(max_batch_size=1)
    executor, collector = start(setup)
    executor.submit("a", [1], SamplingParams(max_tokens=50), collector.sink("a"), timeout_s=10.0)
    executor.submit("b", [2], SamplingParams(max_tokens=50), collector.sink("b"), timeout_s=1.0)
    executor.step()
    setup.clock.advance(2.0)
    executor.step()
    assert collector.reasons == {"b": "timeout"}
    finish(executor)
    assert collector.reasons["a"] == "length"


def test_times_and_deadline_count_from_the_arrival_that_the_caller_knows():
    setup = Setup(max_batch_size=1)
    executor, collector = start(setup)
    setup.clock.advance(5.0)
    requests = {}

    def sink(name):
        take = collector.sink(name)
        return lambda output: bool(requests.update({name: output.request})) or take(output)

    for name, arrived_s in (("known", 3.5), ("now", None), ("late", 3.0)):
        params = SamplingParams(max_tokens=1)
        executor.submit(name, [1], params, sink(name), timeout_s=2.0, arrived_s=arrived_s)
    finish(executor)
    assert {name: (request.arrival_s, request.deadline_s) for name, request in requests.items()} == {
        "known": (3.5, 5.5),
        "now": (5.0, 7.0),
        "late": (3.0, 5.0),
    }
    assert collector.reasons == {"known": "length", "now": "length", "late": "timeout"}


def test_a_late_request_leaves_its_slot_to_one_that_comes_in_the_same_step():
    """The newcomer samples with what is its own, although the end of the late one is told after it."""
    setup = Setup(max_batch_size=1, policy="fixed:3")
    executor, collector = start(setup)
    executor.submit("late", [1], SamplingParams(max_tokens=50), collector.sink("late"), timeout_s=1.0)
    executor.submit("next", [2], SamplingParams(max_tokens=20), collector.sink("next"))
    executor.step()
    setup.clock.advance(2.0)
    executor.step()
    executor.check_integrity()
    assert collector.reasons == {"late": "timeout"}
    assert collector.tokens["next"], "the newcomer did not come in the same step, so this tests nothing"
    finish(executor)
    assert collector.tokens["next"] == greedy_reference(setup.target.table, [2], 20)


def test_speculation_needs_fewer_passes_and_the_counts_add_up():
    requests = [([1, 2, 3], SamplingParams(max_tokens=40))]
    plain = Setup(noise=0.0)
    run(plain, requests)
    setup = Setup(policy="fixed:4", noise=0.0)
    executor, collector = start(setup)
    executor.submit("0", *requests[0], collector.sink("0"))
    finish(executor)
    stats, request = executor.stats(), collector.requests["0"]
    assert plain.target.num_forwards == 40
    assert setup.target.num_forwards <= 10, "a perfect draft of 4 gives 5 tokens a pass"
    assert stats["num_steps"] == setup.target.num_forwards
    assert stats["num_output_tokens"] == 40
    assert stats["num_accepted_tokens"] == request.stats.num_accepted_tokens == stats["num_verified_tokens"]
    assert request.stats.num_steps + request.stats.num_accepted_tokens == 40


def test_reused_prefixes_skip_rows_but_never_the_drafts_missing_kv():
    """The first request never drafts, so the second finds target KV but must not trust draft KV."""
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4, 1]
    setup = Setup(policy="fixed:4", noise=0.0, tokens_per_block=2)
    executor, collector = start(setup)
    executor.submit("off", prompt, SamplingParams(max_tokens=12, num_draft_tokens=0), collector.sink("off"))
    finish(executor)
    assert setup.draft.num_forwards == 0
    executor.submit("on", prompt, SamplingParams(max_tokens=12), collector.sink("on"))
    finish(executor)
    assert collector.tokens["on"] == collector.tokens["off"]
    request = collector.requests["on"]
    assert request.stats.num_cached_tokens == 8
    assert request.stats.num_accepted_tokens == request.stats.num_draft_tokens > 0


class _LatePolicy(StatelessPolicy):
    """Drafts nothing for ten steps, then three tokens."""

    name = "late"

    def __init__(self):
        self.num_plans = 0

    def plan(self, view):
        self.num_plans += 1
        return Decision([3 if self.num_plans > 10 else 0] * len(view.decoding))


class _LateSetup(Setup):
    def make_policy(self):
        return _LatePolicy()


def test_while_nothing_is_drafted_the_draft_model_rests_and_catches_up_later():
    setup = _LateSetup(policy="late", noise=0.0, max_num_tokens=16)
    executor, collector = start(setup)
    executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=40), collector.sink("a"))
    executor.step()
    executor.submit("b", [4, 0, 4, 1] * 5, SamplingParams(max_tokens=40), collector.sink("b"))
    for _ in range(8):
        executor.step()
    assert setup.draft.num_forwards == 0
    finish(executor)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 0, 4, 1] * 5)):
        assert collector.tokens[name] == greedy_reference(setup.target.table, prompt, 40)
        stats = collector.requests[name].stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0, "a perfect draft is accepted after catching up"


def test_ten_thousand_requests_at_once_are_queued_or_refused():
    executor, collector = start(Setup(max_queue_size=4096))
    num_refused = 0
    for i in range(10_000):
        try:
            executor.submit(str(i), [1, 2], SamplingParams(max_tokens=1), collector.sink(str(i)))
        except UnavailableError:
            num_refused += 1
    assert num_refused == 10_000 - 4096
    while executor.step():
        pass
    assert len(collector.reasons) == 4096
    assert set(collector.reasons.values()) == {"length"}
    stats = executor.stats()
    assert stats["kv_num_free_blocks"] == stats["kv_num_blocks"]


def test_progress_tells_a_step_that_hangs_from_a_rest_however_long():
    setup = Setup()
    executor, collector = setup.open(), Collector()
    reached, go_on = threading.Event(), threading.Event()
    forward, run_segment = setup.target.forward, setup.target.run_segment

    def hang(run):
        def hanging(*args):
            reached.set()
            assert go_on.wait(PATIENCE_S)
            return run(*args)

        return hanging

    with executor:
        executor.start()
        time.sleep(0.3)
        assert executor.progress().stalled_s == 0, "it rests"
        setup.target.forward, setup.target.run_segment = hang(forward), hang(run_segment)
        submitted_s = time.monotonic()
        executor.submit("a", [1, 2], SamplingParams(max_tokens=4), collector.sink("a"))
        assert executor.progress().stalled_s <= time.monotonic() - submitted_s, "the rest before it does not count"
        assert reached.wait(PATIENCE_S)
        time.sleep(0.3)
        stuck = executor.progress()
        assert (stuck.has_work, stuck.num_steps) == (True, 0)
        assert stuck.stalled_s >= 0.3
        go_on.set()
        wait_until(lambda: "a" in collector.reasons and not executor.progress().has_work)
        assert executor.progress().stalled_s == 0
        assert executor.progress().num_steps >= 3
        assert 0 < executor.progress().slow_step_s < stuck.stalled_s, "one step that hung is no slow model"
