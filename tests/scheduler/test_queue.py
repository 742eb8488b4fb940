"""The waiting queue: against a sorted list where all requests are of one client, against the Virtual Token Counter
written down once more where there are several, and what a client waits for at most."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.request import Request, RequestState
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.scheduler.queue import INPUT_WEIGHT, MAX_IDLE_CLIENTS, OUTPUT_WEIGHT, WaitingQueue
from tests.scheduler.fake_pass import Bench
from tests.support.effort import examples


def make_request(number, priority=0.5, client="", prompt_len=1, max_tokens=100):
    params = SamplingParams(max_tokens=max_tokens, client_key=client)
    prompt = [1] * prompt_len
    return Request(str(number), prompt, params, max_seq_len=4096, max_draft_len=0, priority=priority)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from([0.0, 0.5, 1.0])),
            st.tuples(st.just("first"), st.integers(0, 6)),
            st.tuples(st.just("end"), st.integers(0, 10)),
            st.tuples(st.just("pop"), st.none()),
        ),
        max_size=40,
    )
)
def test_the_next_requests_of_one_client_are_those_of_a_sorted_list(actions):
    queue, waiting, number = WaitingQueue(), [], 0
    for action, value in actions:
        if action == "push":
            request = make_request(number, value)
            queue.push(request)
            waiting.append(request)
            waiting.sort(key=lambda r: (-r.priority, int(r.request_id)))
            number += 1
        elif action == "first":
            assert queue.first(value) == waiting[:value]
        elif action == "end" and waiting:
            request = waiting.pop(value % len(waiting))
            request.state = RequestState.FINISHED
            queue.note_removed(request)
            queue.forget(request)
        elif action == "pop" and waiting:
            assert queue.peek() is waiting.pop(0)
            queue.pop()
        assert len(queue) == len(waiting)
        assert queue.peek() is (waiting[0] if waiting else None)


class Counters:
    """A simple implementation of the paper's rules, in which all counters are exact at every moment."""

    def __init__(self):
        self.waiting, self.running, self.served, self.last = [], [], {}, None

    def push(self, request):
        key = request.params.client_key
        queued = {r.params.client_key for r in self.waiting}
        if key not in queued:
            floor = min((self.served[other] for other in queued), default=self.served.get(self.last, 0))
            self.served[key] = max(self.served.get(key, 0), floor)
        self.waiting.append(request)

    def order(self):
        served, left, found = dict(self.served), list(self.waiting), []
        while left:
            heads = {}
            for request in sorted(left, key=lambda r: (-r.priority, int(r.request_id))):
                heads.setdefault(request.params.client_key, request)
            key = min(heads, key=lambda k: (-heads[k].priority, served[k], int(heads[k].request_id)))
            served[key] += self.cost(heads[key])
            found.append(heads[key])
            left.remove(heads[key])
        return found

    def cost(self, request):
        return 0 if request.stats.first_scheduled_s is not None else INPUT_WEIGHT * request.prompt_len

    def admit(self, request):
        key = request.params.client_key
        self.waiting.remove(request)
        self.running.append(request)
        self.served[key] += self.cost(request)
        request.stats.first_scheduled_s = 0.0
        if all(r.params.client_key != key for r in self.waiting):
            self.last = key

    def end(self):
        if not (self.waiting or self.running):
            self.served, self.last = {}, None


@settings(max_examples=examples(400))
@given(st.integers(0, 2**32))
def test_the_next_client_is_that_of_the_virtual_token_counter(seed):
    queue, counters, rng = WaitingQueue(), Counters(), random.Random(seed)
    actions = rng.choices(("push", "pop", "take", "run", "preempt", "end"), (4, 3, 1, 4, 1, 2), k=120)
    for number, action in enumerate(actions):
        if action == "push":
            request = make_request(number, rng.choice((0.0, 0.5)), rng.choice("abc"), rng.randint(1, 9))
            queue.push(request)
            counters.push(request)
        elif action in ("pop", "take") and counters.waiting:
            order = counters.order()
            request = rng.choice(order) if action == "take" else order[0]
            if action == "take":
                queue.take(request)
            else:
                assert queue.peek() is request
                queue.pop()
            request.state = RequestState.RUNNING
            counters.admit(request)
        elif action == "run" and counters.running:
            request = rng.choice(counters.running)
            num_tokens = rng.randint(1, 5)
            request.num_tokens += num_tokens
            counters.served[request.params.client_key] += OUTPUT_WEIGHT * num_tokens
        elif action == "preempt" and counters.running:
            request = counters.running.pop(rng.randrange(len(counters.running)))
            request.state = RequestState.WAITING
            queue.push(request)
            counters.push(request)
        elif action == "end" and counters.waiting + counters.running:
            request = rng.choice(counters.waiting + counters.running)
            if request in counters.waiting:
                queue.note_removed(request)
            for found in (counters.waiting, counters.running):
                if request in found:
                    found.remove(request)
            request.state = RequestState.FINISHED
            queue.forget(request)
            counters.end()
        queue.charge()
        order = counters.order()
        assert queue.first(len(order) + 1) == order
        assert queue.peek() is (order[0] if order else None)
        assert len(queue) == len(order)


@settings(max_examples=examples(60))
@given(
    num_slots=st.integers(1, 6),
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=4),
    prompt_len=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_a_newcomer_waits_for_less_than_one_more_request_of_each_other_client(num_slots, others, prompt_len, seed):
    """The number of requests that the others have in the queue does not matter."""
    rng = random.Random(seed)
    bench = Bench(drafts=0, num_blocks=4000, max_batch_size=num_slots, max_num_tokens=64, max_seq_len=128)
    for place, (count, length, max_tokens) in enumerate(others):
        for _ in range(count):
            bench.add(length, max_tokens=max_tokens, client_key=f"other {place}")
    for _ in range(rng.randint(1, 80)):
        if bench.scheduler.has_work():
            bench.step()
    newcomer, admitted_meanwhile = bench.add(prompt_len, max_tokens=4, client_key="newcomer"), []
    while newcomer.state is RequestState.WAITING:
        plan, _, _ = bench.step()
        before = list(plan.admitted)
        if newcomer in before:
            before = before[: before.index(newcomer)]
        admitted_meanwhile += [request.params.client_key for request in before]
    for place in range(len(others)):
        assert admitted_meanwhile.count(f"other {place}") <= 1


def test_clients_share_the_engine_whatever_they_ask_for():
    """One has 200 short requests, one 40 long ones, one asks for one after the other: while all of them wait, each gets
    a third of the weighted tokens, up to what the slots hold."""
    bench = Bench(drafts=0, num_blocks=4000, max_batch_size=4, max_num_tokens=256, max_seq_len=128)
    for _ in range(200):
        bench.add(4, max_tokens=8, client_key="short")
    for _ in range(40):
        bench.add(30, max_tokens=60, client_key="long")
    for _ in range(100):
        bench.add(10, max_tokens=20, client_key="middle")
    served = dict.fromkeys(("short", "long", "middle"), 0)
    for _ in range(300):
        plan, _, outputs = bench.step()
        for request in plan.admitted:
            served[request.params.client_key] += request.prompt_len if request.num_output_tokens < 2 else 0
        for output in outputs:
            served[output.request.params.client_key] += 2 * len(output.new_token_ids)
    largest = 30 + 2 * 60  # of one request
    assert max(served.values()) - min(served.values()) <= 4 * largest
    assert min(served.values()) > 600


def test_a_paused_request_keeps_its_place_among_those_of_its_client():
    queue = WaitingQueue()
    requests = [make_request(number, client="a") for number in range(3)]
    for request in requests:
        queue.push(request)
    assert queue.peek() is requests[0]
    queue.pop()
    requests[0].num_tokens += 3
    queue.push(requests[0])
    assert queue.first(3) == requests


def test_keys_of_clients_that_left_are_few():
    queue = WaitingQueue()
    one = make_request("stays", client="stays")
    queue.push(one)
    for number in range(5 * MAX_IDLE_CLIENTS):
        request = make_request(number, client=f"client {number}")
        queue.push(request)
        request.state = RequestState.FINISHED
        queue.note_removed(request)
        queue.forget(request)
        assert queue.num_clients <= MAX_IDLE_CLIENTS + 1
    assert queue.peek() is one
    one.state = RequestState.FINISHED
    queue.note_removed(one)
    queue.forget(one)
    assert queue.num_clients == 0


def test_who_leaves_for_a_moment_does_not_begin_anew():
    queue = WaitingQueue()
    greedy = [make_request(number, client="greedy") for number in range(2)]
    queue.push(greedy[0])
    queue.push(make_request("patient", client="patient"))
    assert queue.peek() is greedy[0]
    queue.pop()
    greedy[0].state = RequestState.FINISHED
    greedy[0].num_tokens += 90
    queue.forget(greedy[0])
    queue.push(greedy[1])
    queue.push(make_request("late", client="late"))
    assert [request.request_id for request in queue.first(3)] == ["patient", "late", "1"]


def test_a_newcomer_runs_at_once_where_another_client_holds_all_slots():
    """One of its requests runs; its others wait for free slots."""
    bench = Bench(drafts=0, num_blocks=4000, max_batch_size=8, max_num_tokens=64, max_seq_len=512)
    greedy = [bench.add(3, max_tokens=400, client_key="greedy", first=7 * number) for number in range(40)]
    for _ in range(20):
        bench.step()
    newcomers = [bench.add(3, max_tokens=400, client_key="newcomer", first=300 + number) for number in range(6)]
    bench.step()  # both have been served as much so far: the other one's is first
    plan, _, _ = bench.step()
    assert plan.admitted == (newcomers[0],)
    assert plan.paused == (greedy[7],), "the latest of those that run"
    for _ in range(100):
        plan, _, _ = bench.step()
        assert not plan.paused
    running = Counter(request.params.client_key for request in bench.scheduler.running)
    assert running == {"greedy": 7, "newcomer": 1}


@pytest.mark.parametrize("change", [{"client_key": "greedy"}, {"priority": 0.4}, {"max_tokens": 200}])
def test_no_slot_is_taken_for_the_client_s_own_or_a_lesser_or_larger_request(change):
    bench = Bench(drafts=0, num_blocks=4000, max_batch_size=8, max_num_tokens=64, max_seq_len=512)
    for number in range(8):
        bench.add(3, max_tokens=100, client_key="greedy", first=7 * number)
    bench.step()
    bench.add(3, **{"max_tokens": 100, "client_key": "newcomer"} | change)
    for _ in range(20):
        plan, _, _ = bench.step()
        assert not plan.paused
        assert not plan.admitted


def test_the_slots_of_clients_that_all_have_some_do_not_change_hands():
    bench = Bench(drafts=0, num_blocks=4000, max_batch_size=8, max_num_tokens=64, max_seq_len=512)
    for number in range(60):
        bench.add(3, max_tokens=50, client_key=f"client {number % 3}", first=number)
    num_paused = 0
    while bench.scheduler.has_work():
        plan, _, _ = bench.step()
        num_paused += len(plan.paused)
    assert num_paused <= 8, "of 60"
