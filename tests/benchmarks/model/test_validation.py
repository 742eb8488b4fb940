"""The model against measurements, public and our own: each group's error, and what documents and constants say."""

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.model.own_points import own_groups, read_own_points
from benchmarks.model.report import render_own, render_validation
from benchmarks.model.validation import by_group, compare_all, mean_error
from lab.costmodel.accuracy import (
    DECODE,
    MIXTURE_DECODE,
    MIXTURE_SPEED_UP,
    OVERLAP,
    SPEED_UP,
    VERIFY,
    error_by_kind,
)
from lab.costmodel.gpu import GPUS

LIMITS = {
    "decode, H100, 8B bf16, TensorRT-LLM": 0.03,
    "decode, H100, 32B fp8, TensorRT-LLM": 0.08,
    "decode, H100, 70B fp8 TP4, vLLM": 0.07,
    "decode, H200, 70B fp8 TP4, vLLM": 0.10,
    "decode, B200, 70B fp8 TP4, vLLM": 0.25,
    "verification by rows, H100, 8B, vLLM 0.10": 0.10,
    "speed-up, H100, 8B + EAGLE, vLLM 0.10": 0.06,
    "drafting's share of a step, H100, vLLM 0.10": 0.14,
    "speed-up over that of one request, H100, 70B TP4 + 1B, vLLM 0.10": 0.04,
    "time per token, H100, 8B + EAGLE-3, vLLM of mid-2025": 0.16,
    "time per token, H100, 8B, SGLang": 0.05,
    "decode of a mixture, H200, gpt-oss-120b, vLLM": 0.06,
    "decode of a mixture, H200, gpt-oss-120b, TensorRT-LLM": 0.18,
    "decode of a mixture, B200, gpt-oss-120b, vLLM": 0.15,
    "decode of a mixture, B200, gpt-oss-120b, TensorRT-LLM": 0.18,
    "mixtures of experts, H100, against the operator tables": 0.10,
    "time per token, Qwen3-30B-A3B on two H100s, SGLang, the model of one": 0.10,
    "speed-up, Qwen3-30B-A3B with EAGLE-3 on two H100s, SGLang, the model of one": 0.26,
} | {f"models without anchors, {gpu.upper()}, against the operator tables": 0.05 for gpu in GPUS}

OWN_LIMITS = {
    "passes, context 513 to 517": 0.04,
    "decode passes, context 256": 0.04,
    "passes in service, context about 220": 0.04,
    "a pass full of prompts": 0.06,
    "a pass's products": 0.05,
    "draft steps": 0.06,
    "draft calls in service": 0.04,
    "attention of a layer, us": 0.21,
    "products of a draft on fewer SMs": 0.09,
    "products of the target on fewer SMs": 0.08,
    "draft steps on 32 SMs": 0.13,
    "a draft beside a pass": 0.05,
    "a pass beside a draft": 0.03,
    "a step's host": 0.23,
    "whole steps in service": 0.04,
}


@pytest.fixture(scope="module")
def groups():
    return by_group(compare_all())


def test_every_group_is_as_close_as_claimed(groups):
    assert set(groups) == set(LIMITS)
    for group, found in groups.items():
        assert mean_error(found) <= LIMITS[group], group


def test_the_stated_errors_cover_the_points(groups):
    for gpu in ("h100", "h200", "b200"):
        found = [mean_error(c) for group, c in groups.items() if group.startswith(f"decode, {gpu.upper()}")]
        assert max(found) <= DECODE[gpu]
    assert mean_error(groups["verification by rows, H100, 8B, vLLM 0.10"]) <= VERIFY
    assert max(abs(c.error) for c in groups["speed-up, H100, 8B + EAGLE, vLLM 0.10"]) <= SPEED_UP
    for gpu in ("h200", "b200"):
        mixtures = [
            mean_error(c) for group, c in groups.items() if group.startswith(f"decode of a mixture, {gpu.upper()}")
        ]
        assert max(mixtures) <= MIXTURE_DECODE[gpu]
    sglang = [mean_error(c) for group, c in groups.items() if "two H100s" in group]
    assert sglang[0] <= MIXTURE_DECODE["h100"]
    assert sglang[1] <= MIXTURE_SPEED_UP
    assert error_by_kind("h200", is_mixture=True)["decode"] == MIXTURE_DECODE["h200"]
    assert error_by_kind("b200")["verify"] == DECODE["b200"]
    assert error_by_kind("h100")["overlap"] == OVERLAP


def test_our_own_points_are_as_close_as_claimed_and_hardly_further_off_than_before():
    groups = own_groups(read_own_points())
    assert set(groups) == set(OWN_LIMITS)
    for group, found in groups.items():
        now = fmean(abs(point.error) for point in found)
        before = fmean(abs(point.error_before) for point in found)
        assert now <= OWN_LIMITS[group], group
        assert now < before + 0.01, group


def test_the_page_has_the_stated_errors():
    text = (Path(__file__).parents[3] / "docs/plan.md").read_text()
    assumed = dict.fromkeys(("a100", "l40s"), " *")
    for title, is_mixture in (("a decode step, dense", False), ("a decode step, mixture of experts", True)):
        cells = [f"{error_by_kind(gpu, is_mixture=is_mixture)['decode']:.0%}".replace("%", " %") for gpu in GPUS]
        cells = [cell + assumed.get(gpu, "") for cell, gpu in zip(cells, GPUS, strict=True)]
        assert f"| {title} | {' | '.join(cells)} |" in text
    drafting = [f"{error_by_kind(gpu)['draft_step']:.0%}".replace("%", " %") for gpu in GPUS]
    assert f"| drafting | {' | '.join(drafting)} |" in text


def test_the_report_has_a_row_for_each_group(groups):
    own, public = render_own(read_own_points()), render_validation([c for found in groups.values() for c in found])
    assert all(f"| {group} |" in own for group in OWN_LIMITS)
    assert all(f"| {group} |" in public for group in LIMITS)
