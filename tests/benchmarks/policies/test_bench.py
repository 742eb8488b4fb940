"""The whole policy bench on a tiny pair; no time is asserted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.policies import runner
from benchmarks.policies.options import PolicyBenchOptions
from benchmarks.policies.runner import run_policy_bench
from benchmarks.policies.systems import System
from benchmarks.policies.workload import Workload
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL, pick
from tests.support.executor_harness import toy_costs


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyBenchOptions:
    make_options = runner.ProfileOptions
    monkeypatch.setattr(
        runner,
        "ProfileOptions",
        lambda *args, **kwargs: make_options(*args, **kwargs, time_budget_s=0.2, num_prompts=4, max_tokens=16),
    )
    target, draft = make_pair(tmp_path / "pair", num_layers=4)
    return PolicyBenchOptions(
        target,
        draft,
        tmp_path / "out",
        expand=(1,),
        concurrency=(1, 3),
        fixed=(1, 2, 3),
        num_fixed_kept=1,
        minutes=30.0,  # never reached: a busy machine must not cost a round
        max_rounds=1,
        prompt_len=8,
        min_tokens=4,
        max_tokens=12,
        jobs_per_stream=2,
        num_bursty_jobs=12,
    )


@ONLY_ALL
@pytest.mark.slow
def test_every_policy_gives_the_same_tokens(options: PolicyBenchOptions) -> None:
    lines: list[str] = []
    report = run_policy_bench(options, lines.append)
    assert report.is_exact, report.differences
    assert not report.absences
    assert report.workloads(1) == ["concurrency 1", "concurrency 3", "bursty"]
    for workload in report.workloads(1):
        cases = report.select(1, workload)
        assert set(options.systems()) - set(cases) <= {"fixed:1", "fixed:2", "fixed:3"}
        assert sum(name.startswith("fixed:") for name in cases) == 1  # the others were slower in the warm-up round
        for case in cases.values():
            assert len(case.rounds) == 1
            assert 0 < case.rounds[0].oracle <= 1.0
            assert sum(case.rounds[0].modes.values()) == pytest.approx(1.0)
            assert case.rounds[0].rows_per_token >= 1.0
    assert {t.system for t in report.timelines} == set(options.systems())
    data = json.loads((options.output_dir / "policies.json").read_text())
    assert len(data["cases"]) == len(report.cases)
    assert str(options.output_dir) not in json.dumps(data)
    assert "## Goals" in (options.output_dir / "policies.md").read_text()


@ONLY_ALL
@pytest.mark.slow
def test_without_time_one_round_after_the_warm_up_is_measured(options: PolicyBenchOptions) -> None:
    runs: list[tuple[str, int]] = []
    visit = runner.FormRun._visit

    def noted(run: runner.FormRun, workload: Workload, systems: list[System], number: int) -> None:
        runs.append((workload.name, number))
        visit(run, workload, systems, number)

    short = replace(options, minutes=1e-6, policies=("price",), bursty=False, max_rounds=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.FormRun, "_visit", noted)
        report = run_policy_bench(short)
    assert [number for _, number in runs] == [0, 0, 1, 1]
    assert {case.system for case in report.cases} > {"off", "price"}
    assert all(len(case.rounds) == 1 for case in report.cases)


@ONLY_ALL
@pytest.mark.slow
def test_a_simulated_run_repeats_itself(options: PolicyBenchOptions, tmp_path: Path) -> None:
    table = tmp_path / "profile.json"
    curves = dict(toy_costs().curves)
    curves["segment:2@all"] = curves["segment:1@all"]
    replace(toy_costs(), curves=curves).save(table)
    rates = []
    some = replace(options, simulated=True, cost_table=table, policies=pick(("price", "price again"), options.policies))
    some = replace(some, concurrency=pick((3,), some.concurrency), num_bursty_jobs=pick(4, some.num_bursty_jobs))
    for name in ("a", "b"):
        report = run_policy_bench(replace(some, output_dir=tmp_path / name))
        assert report.is_exact
        assert not report.absences
        rates.append({(c.workload, c.system): c.rates() for c in report.cases})
        assert "SIMULATED" in (tmp_path / name / "policies.md").read_text()
    assert rates[0] == rates[1]
    assert rates[0]["concurrency 3", "price"] == rates[0]["concurrency 3", "price again"]
