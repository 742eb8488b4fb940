"""The section "timeline": steps by what is in them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.gpu.engines import timeline
from benchmarks.gpu.engines.step_times import StepTime, StepTimes
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.core.sampling_params import SamplingParams
from tests.benchmarks.gpu.harness import walk
from tests.support.executor_harness import Setup, run

PROMPT = 6


class Watched(Setup):
    def open(self, trace: Any = None) -> Any:
        self.times = StepTimes()
        executor = super().open(trace)
        executor.watch(self.times)
        return executor


def test_a_step_has_prompts_in_it_if_one_ends_there() -> None:
    """Two requests decode from the second step on, and a third joins them for three tokens."""
    setup = Watched(policy="off", reuse=False)
    params = [SamplingParams(max_tokens=n) for n in (20, 20, 3)]
    run(setup, [([1 + i] * PROMPT, each) for i, each in enumerate(params)], arrivals=[0, 0, 5])
    steps = setup.times.steps
    assert [step.num_context_rows for step in steps[:7]] == [2 * PROMPT, 0, 0, 0, 0, PROMPT, 0]
    assert [step.num_requests for step in steps[:7]] == [0, 2, 2, 2, 2, 2, 3]
    assert [step.num_tokens for step in steps[:7]] == [2, 2, 2, 2, 2, 3, 3]
    kinds = timeline.by_kind(steps, load=3)
    assert {kind: len(found) for kind, found in kinds.items()} == {
        "decode only": 2,
        "with prompts": 2,
        "fewer requests": len(steps) - 4,
    }


def test_a_kind_of_steps_is_described_by_its_own() -> None:
    steps = [StepTime(2, rows, 5, 3, 0.5, 2.0, 4.0, both, 0.5) for rows, both in ((10, 9.0), (20, 3.0), (12, 6.0))]
    cells = dict(zip(timeline.HEADER[3:], timeline.step_cells(steps, whole_ms=42.0), strict=True))
    assert (cells["n"], cells["share of time"]) == ("3", "50%")
    assert (cells["rows"], cells["prompt rows"]) == ("12", "5")
    assert (cells["both ms"], cells["step ms, mean"]) == ("6.00", "7.00")
    assert cells["tokens/s"] == f"{9 / 0.021:.0f}"


def test_the_section_runs_dry(options: GpuBenchOptions) -> None:
    (table,) = walk("timeline", options)["tables"]
    assert Counter(row[1] for row in table["rows"]).keys() == timeline.SPELLINGS.keys()
    for name in timeline.SPELLINGS:
        rows = {row[2]: row for row in table["rows"] if row[1] == name}
        assert {"with prompts", "whole run"} <= rows.keys()
        assert float(rows["with prompts"][6]) >= 12, "a whole prompt of a dry run"
        assert int(rows.pop("whole run")[3]) == sum(int(row[3]) for row in rows.values())
