"""The trace is what a viewer reads, and says what the steps did."""

import json
from pathlib import Path

import pytest

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.trace import TraceWriter, check_trace_file
from tests.support.executor_harness import Collector, Setup


@pytest.mark.parametrize("policy", ["fixed:3", "fixed:3:draft_ahead", "fixed:3:ping_pong"])
def test_the_trace_counts_what_the_executor_counts(tmp_path, policy):
    path = tmp_path / "trace.json"
    setup, collector = Setup(policy=policy), Collector()
    with TraceWriter(path) as trace:
        executor = setup.open(trace)
        for name in "ab":
            executor.submit(name, [1, 2, 3], SamplingParams(max_tokens=12), collector.sink(name))
        while executor.step():
            pass
    stats = executor.stats()
    executor.close()
    events = json.loads(path.read_text())
    verify = [e for e in events if e["ph"] == "X" and e["name"] == "verify"]
    assert len(verify) == stats["num_steps"]
    assert sum(e["args"]["num_rows"] for e in verify) == stats["num_rows"]
    assert sum(e["args"]["num_accepted"] for e in verify) == stats["num_accepted_tokens"]
    drafts = [e for e in events if e["ph"] == "X" and e["name"] == "draft"]
    assert sum(e["args"]["num_drafts"] for e in drafts) == stats["num_draft_tokens"]
    mode = policy.split(":")[2] if policy.count(":") == 2 else "serial"
    assert {e["args"]["mode"] for e in verify} == {mode}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def run_one(trace):
    """Steps of one request -> the tokens."""
    collector = Collector()
    executor = Setup(policy="fixed:3").open(trace)
    executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=12), collector.sink("a"))
    while executor.step():
        pass
    executor.close()
    return collector.tokens["a"]


def test_a_full_disk_ends_the_trace_and_not_the_steps(tmp_path, caplog):
    with TraceWriter(tmp_path / "trace.json") as trace:
        tokens = run_one(trace)
    with TraceWriter(Path("/dev/full")) as trace:
        assert run_one(trace) == tokens
    (line,) = (record.getMessage() for record in caplog.records if record.name.endswith("trace"))
    assert line == "the trace /dev/full ends here, it cannot be written: No space left on device"


def test_a_file_that_cannot_be_opened_is_a_line_too(tmp_path, caplog):
    with TraceWriter(tmp_path / "absent" / "trace.json") as trace:
        run_one(trace)
    assert caplog.text.count("cannot be written: No such file or directory") == 1
    with pytest.raises(ConfigError, match=r"^trace_file is .*, which cannot be written: No such file or directory; "):
        check_trace_file(tmp_path / "absent" / "trace.json")


def test_every_step_is_on_the_disk_when_it_has_ended(tmp_path):
    """A killed process leaves a trace that can be read."""
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    run_one(trace)
    cut_off = path.read_text()
    trace.close()
    events = json.loads(cut_off.rstrip(",\n") + "]")
    assert sum(event["name"] == "verify" for event in events if event["ph"] == "X") >= 3


def test_a_restart_keeps_the_trace_of_the_crash(tmp_path):
    path = tmp_path / "trace.json"
    check_trace_file(path)
    crashed = TraceWriter(path)  # and is not closed
    run_one(crashed)
    written = path.read_text()
    with TraceWriter(path):
        assert (tmp_path / "trace.json.1").read_text() == written
        check_trace_file(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.json", "trace.json.1"]
