"""The engines of `faser bench host --engines gpu`: tokens as with those that compute nothing, and their own time."""

import time

import pytest

from benchmarks.host.gpu_engines import HostClock
from benchmarks.host.host_step import PROMPT_LEN, Stopwatch, measure_step, open_executor
from benchmarks.host.null_engines import DRAFTED, OTHER
from benchmarks.host.options import GPU, NULL
from benchmarks.host.runner import modeled_costs
from faser_trtllm.core.sampling_params import SamplingParams

pytest.importorskip("torch")

ACCEPTANCE, MAX_DRAFT_LEN, SEED = 0.7, 4, 3
GREEDY = {"temperature": 0.0}
OTHERS = (
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.1},
)


@pytest.fixture(scope="module")
def costs():
    return modeled_costs(8)


def outputs(engines, system, costs, params, num_steps):
    """Return the new tokens of each request in each step: [num_steps][len(params)] lists."""
    max_tokens = num_steps * (MAX_DRAFT_LEN + 1)
    watch = Stopwatch(engines)
    steps = []
    with open_executor(system, len(params), costs, watch, max_tokens, ACCEPTANCE, MAX_DRAFT_LEN, seed=SEED) as executor:
        for number, values in enumerate(params):
            executor.submit(
                str(number),
                [0] * PROMPT_LEN,
                SamplingParams(max_tokens=max_tokens, **values),
                lambda output: steps[-1].setdefault(output.request.request_id, list(output.new_token_ids)) is None,
            )
        for _ in range(num_steps):
            steps.append({})
            executor.step()
        executor.check_integrity()
    return steps


@pytest.mark.parametrize("system", ["off", "fixed:4", "price", "fixed:4/suffix"])
def test_each_step_brings_what_it_brings_with_engines_that_compute_nothing(costs, system):
    expected = outputs(NULL, system, costs, [GREEDY] * 6, 40)
    assert outputs(GPU, system, costs, [GREEDY] * 6, 40) == expected
    longest = max(len(tokens) for step in expected for tokens in step.values())
    assert longest == 1 if system == "off" else longest > 1


@pytest.mark.parametrize("system", ["off", "fixed:4"])
def test_seeded_sampled_and_edited_requests_get_the_same(costs, system):
    params = [GREEDY, *OTHERS]
    expected = outputs(NULL, system, costs, [GREEDY] * len(params), 20)
    assert outputs(GPU, system, costs, params, 20) == expected


def test_two_drafters_serve_every_kind_of_request_in_every_step(costs):
    steps = outputs(GPU, "price/suffix+model", costs, [GREEDY, *OTHERS], 40)
    assert {len(step) for step in steps} == {1 + len(OTHERS)}
    assert {token for step in steps for tokens in step.values() for token in tokens} == {DRAFTED, OTHER}


def test_a_step_brings_as_many_tokens_as_the_acceptance_promises():
    num_requests, num_steps = 64, 50
    steps = outputs(GPU, "fixed:4", modeled_costs(num_requests), [GREEDY] * num_requests, num_steps)[1:]
    found = sum(len(tokens) for step in steps for tokens in step.values()) / (num_requests * len(steps))
    assert found == pytest.approx(sum(ACCEPTANCE**n for n in range(5)), rel=0.05)


def test_more_requests_than_a_graph_has_rows_are_drafted_for(costs):
    steps = outputs(GPU, "fixed:2", modeled_costs(520), [GREEDY, {**GREEDY, "num_draft_tokens": 0}] * 260, 6)
    assert max(len(tokens) for tokens in steps[-1].values()) == 3
    assert len(steps[-1]) == 520


def test_the_clock_leaves_out_the_device_once(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    clock = HostClock()
    begun = clock.now_s()
    for _ in range(2):
        now[0] += 1.0
        with clock.stopped():
            now[0] += 2.0
            with clock.stopped():
                now[0] += 4.0
            now[0] += 8.0
        now[0] += 16.0
    assert clock.now_s() - begun == 34.0


def test_the_device_is_idle_from_a_wait_to_the_next_launch(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    clock = HostClock()

    def passes(seconds):
        now[0] += seconds

    clock.awaited()
    passes(1.0)
    clock.clear()
    passes(2.0)
    clock.launched()
    with clock.stopped():
        passes(4.0)
    passes(8.0)
    clock.launched()
    passes(16.0)
    clock.awaited()
    passes(32.0)
    clock.launched()
    assert clock.idle_s == 34.0


@pytest.mark.parametrize("system", ["off", "fixed:4"])
def test_the_device_is_idle_for_a_part_of_the_host_s_time(costs, system):
    sizes = {"num_steps": 10, "acceptance": ACCEPTANCE, "max_draft_len": MAX_DRAFT_LEN}
    found = measure_step(system, 4, costs, engines=GPU, **sizes)
    assert 0 < found.idle_us < sum(found.parts_us.values())
    assert measure_step(system, 4, costs, engines=NULL, **sizes).idle_us is None
