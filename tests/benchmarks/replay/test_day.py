"""The simulation of the measured H100 against what was measured on it, 2026-11-26."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import day
from benchmarks.replay.first_seen import FirstSeenGpu
from benchmarks.replay.measured_day import Figure, Run, compare
from benchmarks.replay.recording import MAX_DRAFT_LEN, NUM_OUTPUT, Recording, open_recording
from lab.costmodel.measured import MeasuredGpu
from lab.simulation.synthetic_profile import synthetic_profile
from tests.support.effort import ONLY_ALL

ROOT = Path(__file__).parents[3]
RUN = Run("timeline", 4, "off", 100.0, {}, 10.0, 10.0, 400.0)


def figures(recording: Recording) -> list[Figure]:
    return list(compare(recording, synthetic_profile(MeasuredGpu(is_padded=False))))


def broken(found: list[Figure]) -> dict[str, str]:
    return {
        f"{f.name} {f.run.section} {f.run.load} {f.run.speculation}": f"{f.error:+.1%}" for f in found if f.is_broken
    }


def test_with_drafts_that_pass_at_the_days_rate_all_claims_hold_but_of_first_rounds():
    """Texts are random, so rows differ from the day's; the rounds that do not warm up depend on which rows are new."""
    rng = np.random.default_rng(0)
    num_right = np.minimum(MAX_DRAFT_LEN, rng.geometric(0.25, (96, NUM_OUTPUT)) - 1).astype(np.int32)
    margins = np.ones((96, NUM_OUTPUT, MAX_DRAFT_LEN), np.float32)
    found = figures(Recording(np.arange(96) >= 48, num_right, margins))
    assert len(found) == 52
    assert sum(f.is_claimed for f in found) == 48
    assert broken([f for f in found if f.run.section == "timeline"]) == {}
    steady = [f for f in found if f.name == "steady_median_ms"]
    assert max(abs(f.error) for f in steady) < 0.05


@ONLY_ALL
def test_with_the_demo_pairs_own_texts_all_claims_hold():
    demo = ROOT / "engines" / "demo"
    given = Namespace(recording=None, checkpoint_dir=demo / "target", draft_checkpoint_dir=demo / "draft")
    assert broken(figures(open_recording(given))) == {}


def test_a_claim_that_does_not_hold_ends_the_command_with_status_1(monkeypatch, tmp_path, capsys):
    path = tmp_path / "demo.npz"
    Recording(np.zeros(2, np.bool_), np.zeros((2, 2), np.int32), np.zeros((2, 2, 2), np.float32)).save(path)
    monkeypatch.setattr("sys.argv", ["day", "--recording", str(path)])
    not_claimed = replace(RUN, not_claimed={"tokens_per_s": "a ramp"})
    for run, corrected, status in ((RUN, 109.0, 0), (RUN, 111.0, 1), (RUN, 89.0, 1), (not_claimed, 111.0, 0)):
        found = Figure(run, "steady_median_ms", 10.0, 10.0, 10.0), Figure(run, "tokens_per_s", 100.0, 130.0, corrected)
        monkeypatch.setattr(day, "compare", lambda recording, believed, found=found: iter(found))
        assert day.main() == status
        printed = capsys.readouterr().out
        assert ("Broken" in printed) == bool(status)
        assert ("a ramp" in printed) == (run is not_claimed)


def test_a_row_count_costs_more_once_per_model():
    gpu, plain = FirstSeenGpu(), MeasuredGpu(is_padded=False)
    first_ms = plain.data["first_seen_ms"]["ms"]
    seen = plain.verify_ms(700, 64, 200.0)
    assert gpu.verify_ms(700, 64, 200.0) == pytest.approx(seen + first_ms)
    assert gpu.verify_ms(700, 64, 200.0) == pytest.approx(seen)
    assert gpu.draft_rows_ms(700, 64, 200.0) == pytest.approx(plain.draft_rows_ms(700, 64, 200.0) + first_ms)
    assert gpu.draft_rows_ms(700, 64, 200.0) == pytest.approx(plain.draft_rows_ms(700, 64, 200.0))
    assert gpu.verify_ms(701, 64, 200.0) == pytest.approx(plain.verify_ms(701, 64, 200.0) + first_ms)
    assert gpu.decode_ms(600, 200.0) == pytest.approx(plain.decode_ms(600, 200.0) + first_ms)
    assert FirstSeenGpu().verify_ms(700, 64, 200.0) == pytest.approx(seen + first_ms)


def test_512_rows_are_padded_and_never_new():
    gpu, plain = FirstSeenGpu(), MeasuredGpu(is_padded=False)
    assert gpu.verify_ms(512, 128, 200.0) == plain.verify_ms(512, 128, 200.0)
    assert gpu.draft_rows_ms(512, 128, 200.0) == plain.draft_rows_ms(512, 128, 200.0)
