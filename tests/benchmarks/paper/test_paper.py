"""The simulated experiment: cases repeat themselves, sections are whole, and the report divides by the right base."""

import json
from dataclasses import replace

import pytest

from benchmarks.paper import runner
from benchmarks.paper.arithmetic import Answer
from benchmarks.paper.case import OFF, Result, Setting, run_case
from benchmarks.paper.markdown import ahead_of_best, over_base
from benchmarks.paper.runner import JSON_FILE, TEXT_FILE, PaperBenchOptions, run_paper_bench
from benchmarks.paper.sections import SECTIONS, Question, Section
from faser_trtllm.policy.registry import make_policy
from tests.support.executor_harness import toy_costs

SMALL = Setting("h100", "llama-3.1-8b", "llama-3.2-1b", 2, output_len=32)


def result(setting, system, rate, **changes):
    fields = {
        "section": "adaptive",
        "setting": setting,
        "system": system,
        "tokens_per_s": rate,
        "ttft_p99_ms": 1.0,
        "tpot_p50_ms": 1.0,
        "tpot_p99_ms": 1.0,
        "accepted": 0.5,
        "pruned": 0.0,
        "overlapped": 0.0,
        "wall_s": 1.0,
    }
    return Result(**(fields | changes))


def test_a_case_repeats_itself_and_drafting_pays_for_two_requests():
    first, again = (run_case("static", SMALL, "fixed:2", "fixed:2") for _ in range(2))
    assert replace(first, wall_s=0.0) == replace(again, wall_s=0.0)
    off = run_case("static", SMALL, OFF, "off")
    assert first.tokens_per_s > 1.2 * off.tokens_per_s
    assert (off.accepted, off.overlapped) == (0.0, 0.0)
    assert first.accepted > 0.4


def test_streams_overlap_where_they_are_told_to():
    found = run_case("overlap", replace(SMALL, draft_sms=32), "ping_pong", "fixed:3,mode=ping_pong")
    assert found.overlapped > 0.5


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_its_base_and_spellings_that_are_policies(name):
    section = SECTIONS[name]
    assert section.base in section.systems
    assert len(set(section.settings)) == len(section.settings)
    for spelling in section.systems.values():
        make_policy(spelling, section.max_draft_len, toy_costs(), 8)


def test_systems_are_held_against_the_base_of_their_setting():
    other = replace(SMALL, load=4)
    section = SECTIONS["adaptive"]
    found = over_base(
        section,
        [
            result(SMALL, "fixed:7", 100.0),
            result(SMALL, "price", 150.0),
            result(other, "price", 300.0),
            result(other, "fixed:7", 400.0),
        ],
    )
    assert found == {SMALL: {"fixed:7": [1.0], "price": [1.5]}, other: {"fixed:7": [1.0], "price": [0.75]}}


def test_seeds_are_compared_each_with_its_own_rivals():
    second = replace(SMALL, seed=1)
    rates = {SMALL: {"off": 100.0, "fixed:2": 120.0, "price": 126.0}, second: {"off": 200.0, "fixed:2": 180.0}}
    rates[second]["price"] = 190.0
    results = [result(setting, name, rate) for setting, found in rates.items() for name, rate in found.items()]
    found = over_base(SECTIONS["static"], results)
    assert list(found) == [SMALL]
    assert ahead_of_best(found[SMALL]) == pytest.approx([1.05, 0.95])


def test_results_are_written_and_what_does_not_fit_is_named(tmp_path, monkeypatch):
    said = []
    section = Section("tiny", "tiny", (SMALL, replace(SMALL, load=3)), {OFF: "off"})
    monkeypatch.setitem(runner.SECTIONS, "tiny", section)
    monkeypatch.setattr(
        runner, "run_case", lambda name, setting, system, *_: result(setting, system, 1.0, section=name)
    )
    clock = iter([0.0, 10.0, 100.0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    found = run_paper_bench(PaperBenchOptions(tmp_path, ("tiny",), 1.0), said.append)
    assert [r.setting for r in found] == [SMALL]
    assert said[-1] == "1 settings did not fit into 1 minutes"
    assert len(json.loads((tmp_path / JSON_FILE).read_text())["results"]) == 1
    assert "## tiny" in (tmp_path / TEXT_FILE).read_text()


def test_questions_are_answered_in_the_report_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rates = {"serial": 2.0, "green contexts": 1.5}
    found = [
        Answer(replace(SMALL, gpu=gpu, load=load, acceptance=0.85), "serial", rates, 32)
        for gpu in ("h100", "h200")
        for load in (4, 8)
    ]
    question = Question("sharing", "who shares", (SMALL,), lambda settings: iter(found))
    monkeypatch.setitem(runner.QUESTIONS, "sharing", question)
    run_paper_bench(PaperBenchOptions(tmp_path, ("sharing",), 1.0))
    text = (tmp_path / TEXT_FILE).read_text()
    assert "| serial | green contexts | SMs |" in text
    assert "| 1.00 | 0.75 | 32 |" in text
    assert len(json.loads((tmp_path / JSON_FILE).read_text())["answers"]["sharing"]) == 4
    assert [path.name for path in tmp_path.glob("*.png")] == ["sharing.png"]


def test_price_does_not_pay_for_prompts_that_little_output_is_left_to_pay_back() -> None:
    """No drafting in every lull of prompts where nothing pays: the draft model would have to read all of them."""
    setting = Setting("h200", "llama-3.1-8b", "llama-3.2-1b", 128, seed=1)
    off = run_case("static", setting, OFF, "off")
    price = run_case("static", setting, "price", "price:mode=serial,prune=off")
    assert price.tokens_per_s > 0.98 * off.tokens_per_s
