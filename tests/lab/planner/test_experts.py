"""Plans for mixtures of experts: when speculation pays, and what the plan says of it."""

import json
from dataclasses import replace

import pytest

from lab.costmodel.gpu import GPUS
from lab.costmodel.shape import SHAPES
from lab.planner.advice import notes
from lab.planner.options import parse_acceptance, parse_loads, parse_requests
from lab.planner.plan import make_plan
from lab.planner.systems import parse_systems
from tests.lab.planner.questions import make

QWEN = SHAPES["qwen3-30b-a3b"]
ASKED = make(
    target=QWEN,
    draft=QWEN.eagle3(),
    acceptance=parse_acceptance("0.5"),
    requests=parse_requests("200,100"),
    systems=parse_systems("fixed:5;price"),
)


@pytest.fixture(scope="module")
def plan():
    return make_plan(replace(ASKED, loads=parse_loads("4,64", 0), max_requests=96))


def gains(plan):
    return {(run.concurrency, run.system): run.speed_up.value for run in plan.runs}


def test_long_drafts_lose_with_four_requests_and_pay_with_many(plan):
    """Rows of four requests read 2.9 times the experts of one row each, those of 64 read all of them anyway."""
    found = gains(plan)
    assert found[4, "fixed:5"] < 0.95
    assert found[64, "fixed:5"] > 1.1
    assert found[4, "price"] > 0.97
    assert found[64, "price"] > found[64, "fixed:5"] - 0.03


def test_the_plan_says_that_and_how_many_experts_are_read(plan):
    said = notes(plan)
    assert any("fixed:5 with 4 in flight (0." in sentence for sentence in said)
    (experts,) = (sentence for sentence in said if "mixture of experts" in sentence)
    assert "of 128 in a layer: " in experts
    assert "29 with 4 requests of one row" in experts
    assert "20% of their experts (--expert_overlap" in experts
    assert json.loads(plan.to_json())["distinct_experts"]["64"][0] == pytest.approx(126, abs=1)
    assert plan.memory["off"].weights_gb == pytest.approx(61.1, rel=0.01)


def test_rows_that_share_more_experts_make_drafts_cheaper():
    few, many = (
        gains(make_plan(replace(ASKED, target=QWEN.with_overlap(o), systems=("off", "fixed:5"), max_requests=64)))
        for o in (0.1, 0.45)
    )
    assert many[8, "fixed:5"] > 1.1 * few[8, "fixed:5"]


def test_a_gpu_without_tables_of_such_experts_is_said():
    small = replace(SHAPES["gpt-oss-20b"], num_layers=2)
    for gpu, words in (("l40s", True), ("h100", False)):
        asked = replace(ASKED, gpu=GPUS[gpu], target=small, draft=small.eagle3(), systems=("off",), max_requests=9)
        assert any(f"since a {gpu} has no such tables" in said for said in notes(make_plan(asked))) is words


def test_a_dense_target_has_no_sentence_about_experts():
    assert not any("expert" in sentence for sentence in notes(make_plan(make(systems=("off",), max_requests=8))))
