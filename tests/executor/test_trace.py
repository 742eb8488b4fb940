"""The trace is what a viewer reads, and says what the steps did."""

import json

import pytest

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.trace import TraceWriter
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
