"""The bench's engine process: the real executor at the pace that it is told."""

import sys
from unittest import mock

import pytest

from benchmarks.edge.__main__ import main
from tests.support.effort import pick

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.mark.parametrize("options", [("--stop_words",), *pick([], [()])])
def test_a_token_takes_a_pass_and_not_much_more(tmp_path, monkeypatch, capsys, options):
    for name in ("FASER_ENGINE_MODULE", "FASER_FAKE_STEP_S"):
        monkeypatch.setenv(name, "")  # restored afterwards
    words = ["edge", "--sleeping", f"--engine_dir={tmp_path}", "--streams=3", "--max_tokens=20", "--step_ms=50"]
    with mock.patch.object(sys, "argv", [*words, "--rounds=1", *options]):
        main()
    *_, row = capsys.readouterr().out.splitlines()
    *_, rate, token_ms, _ = row.split("|")
    assert 50 <= float(token_ms) < 200
    assert float(rate) * float(token_ms) / 1e3 == pytest.approx(3, rel=0.1), "one response per request and step"
