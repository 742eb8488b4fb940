"""Random traces of several clients' requests: each gets the text that it gets alone, and nothing is lost.

FASER_TRACE_SECONDS=3600 goes on for an hour (pytest needs --timeout 4000 then); FASER_TRACE_SEED starts elsewhere. A
failure names its seed and the fewest requests that still fail.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from benchmarks.bystander.canary import Canary
from benchmarks.bystander.rule import Delay
from tests.serving.traces.engine_world import EngineWorld
from tests.serving.traces.trace import HANG_UP, READ, STOP, Ask, Result, draw_trace, judge, shrink
from tests.serving.traces.triton_world import TritonWorld
from tests.support.effort import pick
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server

pytestmark = pytest.mark.slow

TOTAL_S = float(os.environ.get("FASER_TRACE_SECONDS", pick(4.0, 60.0)))
FIRST_SEED = int(os.environ.get("FASER_TRACE_SEED", "0"))
MIN_TRACES = 10
MAX_STALL_MS = 3000.0  # longer than next to plain requests: other tests run on the same machine

# Four blocks of 16 rows for each of eight requests.
TIGHT = "max_priority: 1\nkv_cache_config:\n  max_tokens: 512\nmax_batch_size: 4\n"
CONFIGS = {
    "fixed:4": TIGHT + "speculation: fixed:4\n",
    "schedule": TIGHT + "speculation: schedule:2=4,4=1\nstream_interval: auto\n",
    "evict": TIGHT
    + "speculation: fixed:4\ndrafters: [suffix, model]\nscheduler_config:\n"
    + "  capacity_scheduler_policy: MAX_UTILIZATION\n",
}
ROOMY = "max_priority: 1\nkv_cache_config:\n  max_tokens: 1024\nspeculation: fixed:4\ndrafters: [suffix, model]\n"
REFERENCE = "max_priority: 1\nspeculation: 'off'\nmax_batch_size: 8\nkv_cache_config:\n  enable_block_reuse: false\n"


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 8, "max_seq_len": 128, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def reference(engine_dir, tmp_path_factory):
    with EngineWorld(engine_dir, tmp_path_factory.mktemp("reference"), "reference", REFERENCE) as world:
        yield world


class Oracle:
    """Returns the result that a request gets alone, without speculation and without cached blocks of others."""

    def __init__(self, world):
        self._world = world
        self._known = {}

    def __call__(self, ask):
        if ask.key not in self._known:
            self._known[ask.key] = self._world.alone(ask)
        return self._known[ask.key]


def faults(world, trace, oracle):
    """Run the trace; return a description of each fault."""
    expected = [oracle(ask) for ask in trace]
    results = world.run(trace)
    found = [
        f"request {number}: {wrong}"
        for number, parts in enumerate(zip(trace, results, expected, strict=True))
        if (wrong := judge(*parts)) is not None
    ]
    if not world.is_alive():
        found.append("the engine process ended")
    if not found:
        try:
            world.check_idle()
        except AssertionError:
            found.append("a request or a block was not given back")
    return found


def report(world, trace, oracle, seed):
    """The fewest requests that still fail, in words."""
    shorter = shrink(trace, lambda part: bool(faults(world, part, oracle))) if world.is_alive() else trace
    lines = [f"seed {seed} on {world.name}, {len(shorter)} of {len(trace)} requests:", *map(repr, shorter)]
    return "\n".join([*lines, *faults(world, shorter, oracle)] if world.is_alive() else lines)


def run_traces(worlds, oracle, seconds, after=lambda world, trace: None):
    """Random traces on the worlds in turn. after: is called after each."""
    num_traces = num_requests = 0
    deadline_s = time.monotonic() + seconds
    while num_traces < MIN_TRACES or time.monotonic() < deadline_s:
        seed, world = FIRST_SEED + num_traces, worlds[num_traces % len(worlds)]
        trace = world.adapt(draw_trace(seed))
        found = faults(world, trace, oracle)
        assert not found, "\n".join([*found, report(world, trace, oracle, seed)])
        after(world, trace)
        num_traces, num_requests = num_traces + 1, num_requests + len(trace)
    print(f"{num_traces} traces, {num_requests} requests, from seed {FIRST_SEED}")


def test_every_request_gets_the_text_that_it_gets_alone(engine_dir, reference, tmp_path):
    with ExitStack() as stack:
        worlds = [stack.enter_context(EngineWorld(engine_dir, tmp_path, *each)) for each in CONFIGS.items()]
        run_traces(worlds, Oracle(reference), TOTAL_S)


@pytest.mark.triton
def test_so_it_does_behind_triton_where_another_client_s_stream_goes_on(engine_dir, reference, tmp_path):
    """The other client is compared with the same traces without stops, hang-ups and odd fields."""
    config = tmp_path / "faser.yaml"
    config.write_text(ROOMY)
    with ExitStack() as stack:
        server = stack.enter_context(Server(engine_dir, config=config, log=tmp_path / "log")).wait_ready()
        world = stack.enter_context(TritonWorld("triton", server))
        canary = stack.enter_context(Canary(server.grpc_url))
        heard = []

        def after(world, trace):
            spans = []
            for part in (trace, tuple(ask.plain() for ask in trace)):
                begun_s = time.monotonic()
                world.run(part)
                spans.append(canary.heard(begun_s, time.monotonic()))
            heard.append(spans)

        run_traces([world], Oracle(reference), TOTAL_S, after)
        for what in ("first_ms", "gaps_ms"):
            delays = [Delay.of([ms for one in part for ms in getattr(one, what)]) for part in zip(*heard, strict=True)]
            print(f"{what}, p99 and max: {delays}")
            assert delays[0].is_within(delays[1]) or delays[0].max < 2 * delays[1].max + MAX_STALL_MS, what
        assert len({one.text for one in canary.asked}) == 1
        assert not any(one.error for one in canary.asked)


ASK = Ask(0.0, {"text_input": "a", "max_tokens": 4})
ALONE = Result({0: "abcd"}, {0: "length"}, None, True)


@pytest.mark.parametrize(
    ("ask", "result", "is_well"),
    [
        (ASK, Result({0: "abcd"}, {0: "length"}, None, True), True),
        (ASK, Result({0: "abcd"}, {0: "length"}, None, False), False),
        (ASK, Result({0: "abce"}, {0: "length"}, None, True), False),
        (ASK, Result({0: "abc"}, {0: "length"}, None, True), False),
        (ASK, Result({0: "abcd"}, {0: "stop"}, None, True), False),
        (ASK, Result({0: "ab"}, {0: "cancelled"}, None, True), False),
        (ASK, Result({0: "ab"}, {}, None, True), False),
        (ASK, Result({}, {}, "the engine process stopped", True), False),
        (replace(ASK, end=STOP), Result({0: "ab\ufffd"}, {0: "cancelled"}, None, True), True),
        (replace(ASK, end=STOP), Result({0: "ax"}, {0: "cancelled"}, None, True), False),
        (replace(ASK, end=HANG_UP), Result({0: "ab"}, {}, "the request was cancelled", True), True),
        (replace(ASK, end=READ), Result({0: "ab"}, {}, "the request was cancelled", True), False),
        (replace(ASK, fields={"timeout_ms": 1.0}), Result({}, {}, "the request timed out", True), True),
    ],
)
def test_what_may_become_of_a_request(ask, result, is_well):
    assert (judge(ask, result, ALONE) is None) is is_well


def test_a_refused_request_is_refused_in_a_trace():
    refused = Result(error="max_tokens is 0", is_ended=True)
    assert judge(ASK, refused, refused) is None
    assert judge(ASK, ALONE, refused) is not None


def test_a_trace_is_its_seed_s_and_shrinks_to_what_fails():
    trace = next(trace for seed in range(99) if len(trace := draw_trace(seed)) == 13)
    assert draw_trace(5) == draw_trace(5) != draw_trace(6)
    wanted = (trace[2], trace[11])
    assert shrink(trace, lambda part: all(ask in part for ask in wanted)) == wanted
