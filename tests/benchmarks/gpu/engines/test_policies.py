"""The sections "policies" and "other_policies": which rounds are measured, and which stand in a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import policies
from benchmarks.gpu.engines.costs import cost_file
from benchmarks.gpu.engines.jobs import measured_load, warm_up_load
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.models.prompts import bench_prompts
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.policies.drive import DriveResult, Timing
from benchmarks.policies.report import Round
from benchmarks.policies.systems import System, summarize_round
from benchmarks.policies.watch import Counts
from benchmarks.policies.workload import JOBS_PER_STREAM, Workload
from tests.benchmarks.gpu.harness import bench_on, walk
from tests.support.effort import ONLY_ALL
from tests.support.executor_harness import toy_costs

CORE = {"off", "fixed:2", "price"}


@pytest.fixture(scope="module", autouse=True)
def _table(options: GpuBenchOptions) -> None:
    """A cost table of the pair, as the section "costs" leaves it."""
    bench = bench_on(options)
    with open_pair(bench, "1B", PairLimits(2, 48, 64)) as pair:
        table = dataclasses.replace(toy_costs(), fingerprint=bench.machine.fingerprint(pair.made_of))
    table.save(bench.file(cost_file("1B")))


def cells(found: dict[str, Any]) -> dict[str, list[str]]:
    """System -> its cells in the first table."""
    return {row[0]: row[1:] for row in found["tables"][0]["rows"]}


def test_the_policies_are_measured_on_the_same_requests(
    options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "NUM_ROUNDS", 2)
    found = walk("policies", options)
    assert set(cells(found)) == CORE
    assert not found["notes"]
    for name, row in cells(found).items():
        assert all((" to " in cell) == (name != "off") for cell in row), "a ratio, and its range over the rounds"
        assert "-" not in row


@ONLY_ALL
def test_every_other_policy_is_measured_against_off(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "NUM_ROUNDS", 1)
    found = cells(walk("other_policies", dataclasses.replace(options, fixed=(2, 3, 4))))
    assert set(found) == {
        *("off", "fixed:4", "schedule", "gp_lcb", "price+pruning", "price+pruning+overlap"),
        *("fixed:4 draft_ahead", "fixed:4 ping_pong"),
    }
    assert all(cell != "-" for row in found.values() for cell in row)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(system, requests in flight, requests) of every run. None takes time, and all come to the same."""
    noted: list[tuple[str, int, int]] = []
    result = DriveResult(100.0, 1.0, 0.0, (Timing(0.1, 0.01),), ((1, 2),))

    def note(system: System, workload: Workload) -> tuple[Round, DriveResult]:
        assert workload.concurrency is not None
        noted.append((system.name, workload.concurrency, len(workload.jobs)))
        return summarize_round(result, Counts()), result

    monkeypatch.setattr(System, "run", note)
    return noted


def stop_after(monkeypatch: pytest.MonkeyPatch, runs: list[Any], num_runs: int) -> None:
    """The time is over for good once so many runs have ended."""
    monkeypatch.setattr(Bench, "left_s", property(lambda bench: 1e9 if len(runs) < num_runs else -1.0))


@pytest.mark.parametrize("num_runs", [1, 2, 5, 7])
def test_what_only_warmed_up_stands_in_no_table(
    options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[str, int, int]], num_runs: int
) -> None:
    """The time is over in the middle of the first round of one request, or of two."""
    stop_after(monkeypatch, runs, num_runs)
    bench = bench_on(options)
    policies.run(bench)
    record = bench.record
    assert len(runs) == num_runs
    measured = {(name, load) for name, load, jobs in runs if jobs > load}
    details = {table["title"]: {row[0] for row in table["rows"]} for table in record.data["tables"][1:]}
    loads = {load for _, load in measured}
    assert details == {
        f"1B, {load} request(s) in flight": {name for name, at in measured if at == load} for load in loads
    }
    if measured:
        rows, header = cells(record.data), record.data["tables"][0]["header"][1:]
        assert {
            (name, int(load)) for name in rows for load, cell in zip(header, rows[name], strict=True) if cell != "-"
        } == measured
    notes = " ".join(record.data["notes"])
    for load in (1, 2):
        missing = [name for name in CORE if (name, load) not in measured]
        assert (f"{load} request(s) in flight: no time for" in notes) == bool(missing)
        assert all(name in notes for name in missing)
    assert bool(record.data["errors"]) == (not measured)


def test_a_system_warms_up_once_at_each_load(options: GpuBenchOptions, runs: list[tuple[str, int, int]]) -> None:
    policies.run(bench_on(options))
    for name in CORE:
        for load in policies.DRY_LOADS:
            jobs = [count for system, at, count in runs if (system, at) == (name, load)]
            assert jobs == [load] + policies.NUM_ROUNDS * [max(8, JOBS_PER_STREAM * load)]


def test_a_load_has_enough_requests_for_its_start_to_matter_little(options: GpuBenchOptions) -> None:
    bench = bench_on(options)
    prompts = bench_prompts(bench)
    for load in (1, 16, 256):
        work, warm_up = measured_load(bench, prompts, load, 0), warm_up_load(bench, prompts, load)
        assert len(work.jobs) >= 4 * load
        assert work.concurrency == warm_up.concurrency == load
        assert warm_up.num_tokens < work.num_tokens / 4
