"""Acceptance curves as chances by place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.golden import lengths_of
from faser_trtllm.acceptance_curves import (
    DRAFTERS,
    PUBLISHED,
    by_place,
    parse_curves,
    published_curves,
    published_names,
)
from faser_trtllm.config import ExecutorConfig, parse, read_mapping
from faser_trtllm.errors import ConfigError, FaserError
from faser_trtllm.sampling.synthetic_accept import place_probabilities


def test_a_curve_has_its_length_at_every_number_of_drafts() -> None:
    """Not only at the largest one, as a policy that changes the number needs it."""
    lengths = (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21)
    chances = by_place(lengths)
    for k, length in enumerate(lengths, 1):
        accepted = np.cumprod(place_probabilities(chances, k)).sum()
        assert 1.0 + accepted == pytest.approx(length)
    assert parse(ExecutorConfig, {"synthetic_acceptance": list(chances)}).synthetic_acceptance == chances


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_curves_and_chances_are_inverse(chances: list[float]) -> None:
    lengths = lengths_of(chances)
    assert lengths_of(by_place(lengths)) == pytest.approx(lengths)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_whatever_was_measured_gives_chances(parts: list[float]) -> None:
    lengths = [1.0 + part * (count + 1) for count, part in enumerate(parts)]
    chances = by_place(lengths)
    assert len(chances) == len(lengths)
    assert all(0.0 <= chance <= 1.0 for chance in chances)


def test_a_curve_that_no_chances_have_gets_the_nearest() -> None:
    # Later drafts cannot be accepted more often than those before them: 0.1 and 0.3 become 0.2 each.
    assert lengths_of(by_place([1.5, 1.6, 1.9])) == pytest.approx([1.5, 1.7, 1.9])
    assert lengths_of(by_place([1.5, 1.4, 1.3])) == pytest.approx([1.5, 1.5, 1.5])


def test_the_published_curves_are_near_what_they_become() -> None:
    curves = {name: lengths for name, lengths in published_curves().items() if "/" in name}
    assert len(curves) == 14
    assert curves["glm-5.2-fp8-mtp/thinking_on"] == (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06)
    for lengths in curves.values():
        assert lengths_of(by_place(lengths)) == pytest.approx(lengths, abs=0.31)
    text = PUBLISHED.read_text()
    assert "SemiAnalysis" in text
    assert "Apache License, Version 2.0" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no curves"),
        ("a: 3", "curves.yaml: a/ must have lengths"),
        ("a: {t: 1.5}", "a/t must have lengths of 1 to 64"),
        ("a: {t: {}}", "a/t must have lengths of 1 to 64"),
        ("a: {t: {1: 1.5, 3: 2}}", "a/t has None at 2; it must be 1 to 3"),
        ("a: {t: {1: 2.5}}", "a/t has 2.5 at 1; it must be 1 to 2"),
        ("a: {t: {1: 0.5}}", "a/t has 0.5 at 1"),
        ("a: {t: {1: .nan}}", "a/t has nan at 1"),
        ("a: {t: {1: true}}", "a/t has True at 1"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "curves.yaml").write_text(text)
    with pytest.raises(FaserError, match=message):
        parse_curves(read_mapping(tmp_path / "curves.yaml"), "curves.yaml")


def test_a_pair_of_one_mode_needs_none_and_a_drafter_is_its_pairs_mean() -> None:
    curves = published_curves()
    assert curves["kimi-k3-dspark"] == curves["kimi-k3-dspark/thinking_on"]
    assert "kimi-k2.5-nvfp4-eagle3" not in curves  # thinking or not
    for drafter in DRAFTERS:
        pairs = [lengths for name, lengths in curves.items() if "/" in name and f"-{drafter}" in name]
        assert len(pairs) >= 3
        assert curves[drafter] == pytest.approx(np.mean(pairs, axis=0))


@pytest.mark.parametrize("name", ["eagle3", "kimi-k3-dspark", "glm-5.2-fp8-mtp/thinking_on"])
def test_synthetic_acceptance_takes_a_curve_by_name(name: str) -> None:
    chances = parse(ExecutorConfig, {"synthetic_acceptance": name}).synthetic_acceptance
    assert chances == by_place(published_curves()[name])


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance is 'eagle2': it must be a number") as caught:
        parse(ExecutorConfig, {"synthetic_acceptance": "eagle2"})
    assert str(caught.value).endswith(f"or a published curve: {published_names()}")
    assert "dspark, eagle3, mtp, deepseek-v4-pro-mtp/thinking_on" in published_names()
