"""Tests of what a soak counts as failures, leaks and recoveries, on requests and samples made by hand."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bystander.cases import BASE, Case
from benchmarks.soak.growth import MIB, Trend, count_lives, fit_trends, measure_growth, slope
from benchmarks.soak.jobs import UNARY, WORST, BadInput, Cancellation, Job, Plan, Planner
from benchmarks.soak.ledger import Answer, Ending, Kill, Ledger, judge
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.service import RESTARTS
from benchmarks.soak.storm import plan_events
from benchmarks.soak.verdict import Condition, Resting, judge_run
from benchmarks.soak.watch import ProcessSample, Sample

JOB = Job({"text_input": "a"}, "the text", "length")
BAD = BadInput({"max_tokens": 0}, "max_tokens is 0")
STOPPED = "the engine process stopped while it served the request; send the request again"

LATE = "the request timed out in the queue, timeout_ms is 5; try again later or raise it"


def answer(**fields) -> Answer:
    return Answer(**{"sent_s": 10.0, "ended_s": 11.0} | fields)


@pytest.mark.parametrize(
    ("request_", "fields", "was_down", "ending"),
    [
        (JOB, {"text": "the text", "finish_reason": "length"}, False, Ending.FINISHED),
        (JOB, {"text": "the text", "finish_reason": "stop"}, False, Ending.FAILED),
        (JOB, {"text": "the tex", "finish_reason": "length"}, False, Ending.FAILED),
        (JOB, {"text": "the text!", "finish_reason": "length"}, False, Ending.FAILED),
        (JOB, {"text": "the text"}, False, Ending.FAILED),
        (JOB, {"text": "the", "was_cancelled": True}, False, Ending.CANCELLED),
        (JOB, {"was_cancelled": True}, True, Ending.CANCELLED),
        (JOB, {"text": "thy", "was_cancelled": True}, False, Ending.FAILED),
        (JOB, {"text": "the\ufffd", "finish_reason": "cancelled", "was_cancelled": True}, False, Ending.CANCELLED),
        (JOB, {"text": "the\ufffd", "was_cancelled": True}, False, Ending.FAILED),
        (JOB, {"text": "thy\ufffd", "finish_reason": "cancelled", "was_cancelled": True}, False, Ending.FAILED),
        (JOB, {"text": "the", "finish_reason": "cancelled"}, False, Ending.FAILED),
        (JOB, {"text": "the", "error": STOPPED}, True, Ending.LOST),
        (JOB, {"text": "thy", "error": STOPPED}, True, Ending.FAILED),
        (JOB, {"text": "the", "error": STOPPED}, False, Ending.FAILED),
        (JOB, {"error": "DEADLINE_EXCEEDED"}, True, Ending.FAILED),
        (BAD, {"error": "max_tokens is 0, the engine allows 1 to 512"}, False, Ending.REFUSED),
        (BAD, {"error": "top_p is 0"}, False, Ending.FAILED),
        (BAD, {"error": STOPPED}, True, Ending.LOST),
        (BAD, {"finish_reason": "length"}, False, Ending.FAILED),
    ],
)
def test_every_answer_has_one_ending(request_, fields, was_down, ending) -> None:
    found, reason = judge(Plan(request_), answer(**fields), was_down)
    assert found is ending
    assert bool(reason) == (ending is Ending.FAILED)


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"text": "the text", "finish_reason": "length"}, Ending.FINISHED),
        ({"text": "the", "finish_reason": "timeout"}, Ending.LATE),
        ({"text": "the \ufffd", "finish_reason": "timeout"}, Ending.LATE),
        ({"error": LATE}, Ending.LATE),
        ({"text": "thy", "finish_reason": "timeout"}, Ending.FAILED),
        ({"text": "the", "finish_reason": "length"}, Ending.FAILED),
    ],
)
def test_only_requests_with_a_deadline_may_time_out(fields, ending) -> None:
    assert judge(Plan(JOB, {"timeout_ms": 5.0}), answer(**fields), False)[0] is ending
    without = Ending.FINISHED if ending is Ending.FINISHED else Ending.FAILED
    assert judge(Plan(JOB), answer(**fields), False)[0] is without


HOSTILE = Plan(Case("worst", BASE), kind=WORST)


@pytest.mark.parametrize(
    ("fields", "was_down", "ending"),
    [
        ({"finish_reason": "served"}, False, Ending.SERVED),
        ({"finish_reason": "served", "was_cancelled": True}, False, Ending.CANCELLED),
        ({"error": 'data: {"error":"bad_words has 513 entries, allowed are at most 512"}'}, False, Ending.REFUSED),
        ({"error": LATE}, False, Ending.LATE),
        ({"error": STOPPED}, True, Ending.LOST),
        ({"error": STOPPED}, False, Ending.FAILED),
        ({"error": "the request could not be read: KeyError"}, False, Ending.FAILED),
        ({"error": "DEADLINE_EXCEEDED Deadline Exceeded"}, False, Ending.LATE),
        ({"error": "TimeoutError: timed out"}, False, Ending.LATE),
        (
            {"error": "guided_decoding_guide cannot be followed (Parser Error: 6001 items); simplify it"},
            False,
            Ending.REFUSED,
        ),
        ({"error": "ConnectionResetError: [Errno 104]"}, False, Ending.FAILED),
    ],
)
def test_a_hostile_request_is_served_or_refused(fields, was_down, ending) -> None:
    assert judge(HOSTILE, answer(**fields), was_down)[0] is ending


CUT = "RemoteDisconnected: Remote end closed connection without response"


@pytest.mark.parametrize(
    ("plan", "fields", "ending"),
    [
        (Plan(JOB), {"text": "the", "error": CUT}, Ending.LOST),
        (Plan(JOB), {"text": "the"}, Ending.LOST),
        (Plan(JOB), {"text": "thy", "error": CUT}, Ending.FAILED),
        (Plan(BAD), {"error": "UNAVAILABLE failed to connect"}, Ending.LOST),
        (HOSTILE, {"error": CUT}, Ending.LOST),
        (Plan(JOB), {"error": "INTERNAL Internal error from Core"}, Ending.LOST),
        (Plan(JOB), {"error": "INTERNAL"}, Ending.FAILED),
    ],
)
def test_a_killed_server_cuts_its_connections(plan, fields, ending) -> None:
    assert judge(plan, answer(**fields), True, was_server_down=True)[0] is ending
    assert judge(plan, answer(**fields), True)[0] is Ending.FAILED


def test_clients_of_a_killed_server_have_a_moment_to_notice_that_it_is_back() -> None:
    late = answer(sent_s=12.5, ended_s=13.0)
    assert Kill(10.0, 10.0, 12.0, "tritonserver").concerns(late)
    assert not Kill(10.0, 10.0, 12.0, "engine").concerns(late)


def test_the_share_of_hostile_requests_is_of_all() -> None:
    ledger = Ledger()
    for kind in ("", "", WORST, UNARY):
        ledger.close("http", Plan(JOB, kind=kind), answer(was_cancelled=True))
    assert ledger.share_of_hostile() == 0.5


def test_a_storm_stops_all_processes_once_and_ends_before_the_calm() -> None:
    options = SoakOptions(Path("engine"), Path("out"), minutes=60.0)
    events = plan_events(options)
    pauses = [event for event in events if event.what == "pause"]
    assert [len(event.roles) for event in pauses] == [1, 1, 3]
    assert max(event.seconds for event in pauses) == 90.0
    assert [event.roles for event in events if event.what == "kill"].count(("tritonserver",)) == 2
    assert len(events) == 3 + 2 + 9
    assert max(event.at_s + event.seconds for event in events) < options.storm_s
    assert plan_events(replace(options, kill_period_s=0.0, kill_server=False, pause_s=0.0)) == []


@given(st.floats(0, 30), st.floats(0, 10), st.one_of(st.none(), st.floats(0, 30)))
def test_a_kill_concerns_what_was_open_before_the_recovery(sent_s: float, took_s: float, recovered_s) -> None:
    kill = Kill(10.0, 10.0, None if recovered_s is None else 10.0 + recovered_s)
    until_s = math.inf if recovered_s is None else 10.0 + recovered_s
    was_open = any(sent_s <= moment <= sent_s + took_s for moment in (10.0, until_s))
    is_inside = sent_s >= 10.0 and sent_s + took_s <= until_s
    assert kill.concerns(answer(sent_s=sent_s, ended_s=sent_s + took_s)) == (was_open or is_inside)


def test_a_kill_ends_with_the_first_token_of_a_request_sent_after_it() -> None:
    ledger = Ledger()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    before = answer(sent_s=0.0)
    ledger.kill(child.pid)
    assert child.wait(10) == -signal.SIGKILL
    (kill,) = ledger.kills
    before.first_s = kill.dead_s + 0.1
    ledger.first_token(before)
    assert kill.recovery_s is None
    for wait_s in (0.5, 0.9):
        ledger.first_token(answer(sent_s=kill.dead_s + 0.2, first_s=kill.killed_s + wait_s))
    assert kill.recovery_s == pytest.approx(0.5)
    assert ledger.close("grpc", Plan(JOB), answer(sent_s=kill.dead_s, ended_s=kill.dead_s + 9, error=STOPPED)) is (
        Ending.LOST
    )
    late = answer(sent_s=kill.dead_s + 1.0, ended_s=kill.dead_s + 1.1, error=STOPPED)
    assert ledger.close("grpc", Plan(JOB), late) is Ending.FAILED
    assert (ledger.total(), ledger.total(Ending.LOST), dict(ledger.failures)) == (2, 1, {STOPPED: 1})


def test_the_planner_keeps_its_shares_and_cancels_at_every_stage() -> None:
    planner = Planner((JOB,), (BAD,), cancel_share=0.2, bad_share=0.05, late_share=0.1, seed=3)
    plans = [planner.next(1.0) for _ in range(4000)]
    kinds = [plan.kind for plan in plans]
    assert kinds.count("to cancel") == pytest.approx(800, abs=100)
    assert kinds.count("bad input") == pytest.approx(200, abs=60)
    assert kinds.count("with a deadline") == pytest.approx(400, abs=80)
    deadlines = [plan.fields["timeout_ms"] for plan in plans if plan.has_deadline]
    assert 0.0 < min(deadlines) < 20.0 < 900.0 < max(deadlines) <= 1000.0
    cancellations = [plan.cancellation or Cancellation() for plan in plans]
    times = [c.after_s for c in cancellations if c.after_s is not None]
    assert min(times) < 0.02 < 0.9 < max(times)
    assert {c.after_responses for c in cancellations} > {1, 2, 8}
    assert {plan.fields["stream"] for plan in plans} == {True, False}


FILE_MIB = 20.0  # of resident memory, backed by files


def sample(at_s: float, rss_mib: float, pid: int = 7, fds: int = 10, threads: int = 5, role="engine"):
    process = ProcessSample(pid, int(rss_mib * MIB), int((rss_mib - FILE_MIB) * MIB), fds, threads)
    return Sample(at_s, {role: process})


def test_slope_ignores_outliers() -> None:
    points = [(float(i), 3.0 * i + (1000.0 if i % 10 == 0 else 0.0)) for i in range(1000)]
    assert slope(points) == pytest.approx(3.0, rel=0.01)
    assert slope([(1.0, 2.0)]) == slope([]) == 0.0


@pytest.mark.parametrize(("per_s", "mib"), [(0.0, 0.0), (0.1, 60.0), (-0.1, -60.0)])
def test_growth_of_a_process_that_lives_on(per_s: float, mib: float) -> None:
    (growth,) = measure_growth([sample(float(i), 100 + per_s * i, role="tritonserver") for i in range(601)])
    assert growth.mib == pytest.approx(mib, abs=0.1)
    assert growth.mib_per_hour == pytest.approx(6 * mib, abs=0.5)
    assert growth.num_lives == 1


@pytest.mark.parametrize("per_hour", [0.0, 3.0, -3.0])
def test_a_trend_goes_through_the_rests(per_hour: float) -> None:
    """A process that died before does not count, nor do pages of files."""
    old = [sample(60.0 * i, 900.0 - 60 * i, pid=1) for i in range(5)]
    new = [sample(60.0 * i, 100.0 + per_hour * i / 60 + 0.1 * (i % 2), pid=2) for i in range(5, 35)]
    files = [
        Sample(rest.at_s, {role: replace(p, rss_bytes=p.rss_bytes + i * MIB) for role, p in rest.processes.items()})
        for i, rest in enumerate(new)
    ]
    (trend,) = fit_trends([*old, *files])
    assert trend.mib_per_hour == pytest.approx(per_hour, abs=0.05)
    assert 0.0 < trend.error < 0.1
    assert (trend.num_points, trend.minutes) == (30, pytest.approx(29.0))
    assert fit_trends(new[:5]) == []
    assert count_lives([*old, *new]) == {"engine": 2}


def test_growth_of_an_engine_child_is_seen_over_lives_and_within_one() -> None:
    def lives(within_mib_per_s: float, each_mib: float):
        """Five lives of 100 s, whose first seconds reach 50 MiB more at once."""
        for life in range(5):
            for i in range(100):
                settled = 50.0 if i > 5 else 10.0 * i
                yield sample(100.0 * life + i, 50 + settled + within_mib_per_s * i + each_mib * life, pid=life)

    (flat,) = measure_growth(list(lives(0.0, 0.0)))
    (over,) = measure_growth(list(lives(0.0, 10.0)))
    (within,) = measure_growth(list(lives(0.5, 0.0)))
    assert abs(flat.mib) < 1.0
    assert over.mib > 30.0
    assert within.mib == pytest.approx(0.5 * 69, rel=0.1)
    assert {flat.num_lives, over.num_lives, within.num_lives} == {5}


IDLE = {"requests running": 0.0, "requests waiting": 0.0, "KV blocks free": 64.0, "KV blocks": 64.0, RESTARTS: 3.0}


def run_of(**changes) -> list[Condition]:
    """The conditions of a run in which all is well, but for the changes."""
    well = Ledger()
    well.close("grpc", Plan(JOB), answer(text="the text", finish_reason="length"))
    well.kills.append(Kill(1.0, 1.0, 2.0))
    at_rest = Resting(IDLE, sample(0.0, 100.0))
    before = Resting(IDLE | {RESTARTS: 2.0}, sample(0.0, 100.0))
    growths = measure_growth([sample(float(i), 100.0) for i in range(100)])
    options = SoakOptions(Path("engine"), Path("out"), max_recovery_s=5.0)
    parts = {
        "options": options,
        "warmup": Ledger(),
        "ledger": well,
        "baseline": before,
        "end": at_rest,
        "growths": growths,
        "leftovers": [],
    }
    return judge_run(**parts | changes)


def failing(**changes) -> list[str]:
    return [condition.name for condition in run_of(**changes) if not condition.is_met]


def lost_kill() -> Ledger:
    ledger = Ledger()
    ledger.close("grpc", Plan(JOB), answer(text="the text", finish_reason="length"))
    ledger.kills.append(Kill(5.0, 5.0, None))
    return ledger


def failed() -> Ledger:
    ledger = Ledger()
    ledger.close("http", Plan(JOB), answer(error="what?"))
    return ledger


def test_a_run_in_which_all_is_well_passes() -> None:
    assert failing() == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"warmup": failed()}, ["every request ended as it may, warm-up included"]),
        (
            {"ledger": failed()},
            ["every request ended as it may, warm-up included", "requests finished with their text"],
        ),
        ({"ledger": lost_kill()}, ["service after each kill of the engine"]),
        (
            {"end": Resting(IDLE | {"KV blocks free": 63.0}, sample(9.0, 100.0))},
            ["no request and no KV block is held"],
        ),
        ({"end": Resting(IDLE | {"requests running": 1.0}, None)}, ["no request and no KV block is held"]),
        (
            {"end": Resting({}, None)},
            ["no request and no KV block is held", "the metrics count the restarts"],
        ),
        ({"end": Resting(IDLE | {RESTARTS: 4.0}, sample(0.0, 100.0))}, ["the metrics count the restarts"]),
        ({"end": Resting(IDLE, sample(9.0, 100.0, fds=13))}, ["descriptors and threads of engine"]),
        ({"end": Resting(IDLE, sample(9.0, 100.0, threads=8))}, ["descriptors and threads of engine"]),
        ({"end": Resting(IDLE, replace(sample(9.0, 100.0), processes={}))}, ["the same processes are there"]),
        (
            {"growths": measure_growth([sample(float(i), 100 + i) for i in range(100)])},
            ["memory of engine is flat"],
        ),
        ({"leftovers": ["process engine"]}, ["nothing is left over"]),
        ({"lives": {"engine": 3, "tritonserver": 1}}, ["no healthy engine was ended"]),
        ({"lives": {"engine": 2, "tritonserver": 2}}, ["no healthy tritonserver was ended"]),
        ({"log_mib_per_hour": 1.5}, ["the log is short"]),
        ({"trends": [Trend("engine", 1.5, 0.1, 30, 30.0)]}, ["memory of engine has no slope in the calm"]),
    ],
)
def test_each_condition_can_fail(changes, names) -> None:
    assert failing(**changes) == names
