"""Acceptance curves as chances by place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.bench.golden import PUBLISHED, by_place, lengths_of, main, read_curves
from faser_trtllm.config import ExecutorConfig, parse
from faser_trtllm.errors import InvalidArgumentError
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
    curves = read_curves()
    assert len(curves) == 14
    assert curves["glm-5.2-fp8-mtp/thinking_on"] == (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06)
    for lengths in curves.values():
        assert lengths_of(by_place(lengths)) == pytest.approx(lengths, abs=0.31)
    text = PUBLISHED.read_text()
    assert "SemiAnalysis" in text
    assert "Apache License, Version 2.0" in text


def test_the_command_prints_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text("some-model:\n  thinking_off:\n    1: 1.5\n    2: 1.75\n")
    main([str(path)])
    printed = capsys.readouterr().out
    assert printed.startswith("# some-model/thinking_off: acceptance length 1.5 1.75; off by 0.00")
    assert yaml.safe_load(printed) == {"synthetic_acceptance": [0.5, 0.5]}
    with pytest.raises(InvalidArgumentError, match="curve is 'x', the file has some-model/thinking_off"):
        main([str(path), "--curve", "x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no curves"),
        ("a: 3", "curves.yaml: a/ must have lengths"),
        ("a: {t: 1.5}", "a/t must have lengths of 1 to 64"),
        ("a: {t: {}}", "a/t must have lengths of 1 to 64"),
        ("a: {t: {1: 1.5, 3: 2}}", "a/t has None at 2, it must be 1 to 3"),
        ("a: {t: {1: 2.5}}", "a/t has 2.5 at 1, it must be 1 to 2"),
        ("a: {t: {1: 0.5}}", "a/t has 0.5 at 1"),
        ("a: {t: {1: .nan}}", "a/t has nan at 1"),
        ("a: {t: {1: true}}", "a/t has True at 1"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "curves.yaml").write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        read_curves(tmp_path / "curves.yaml")
