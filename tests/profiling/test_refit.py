"""`faser profile --refit`: a recorded profile judged on any machine, and warnings about curves that do not fit."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faser_trtllm import cli
from faser_trtllm.commands.table import load
from faser_trtllm.config import ExecutorConfig, ServiceConfig
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.curve_error import CurveError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.fingerprint import PROFILE
from faser_trtllm.profiling import profile
from faser_trtllm.profiling.ensure import measure_once
from faser_trtllm.serving.launch.hashes import FileHashes
from faser_trtllm.serving.launch.options import check_engines
from tests.support.engine_dirs import make_engine_dir

RECORDED = Path(__file__).parent.parent / "data" / "h100_demo_profile.json"


def refit(*arguments: str) -> str:
    result = CliRunner().invoke(load("profile"), ["--refit", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_profile_of_another_machine_and_an_older_version_is_judged() -> None:
    """Measured on an H100, 2026-11-26, without held-out points and with a curve that was 423 % off."""
    found = json.loads(refit(str(RECORDED), "--json"))
    assert set(found) == {"curves"}
    assert set(found["curves"]) == {"verify@all", "draft_step@all", "draft_rows@all", "decode@all"}
    for errors in found["curves"].values():
        assert errors["in_sample"] < 0.02
        assert errors["held_out"] is None
        assert not errors["left_out"]


def test_held_out_samples_are_told_apart_for_people_and_programs(tmp_path: Path) -> None:
    data = json.loads(RECORDED.read_text())
    data["held_out"] = [s | {"ms": 1.1 * s["ms"], "predicted_ms": 1.0} for s in data["samples"] if s["num_rows"] == 8]
    (tmp_path / "profile.json").write_text(json.dumps(data))
    found = json.loads(refit(str(tmp_path / "profile.json"), "--json"))["curves"]
    assert found["verify@all"]["held_out"] == pytest.approx(0.1, abs=0.03)
    assert found["draft_rows@all"]["held_out"] is None
    text = refit(str(tmp_path / "profile.json"))
    (line,) = (line for line in text.splitlines() if line.startswith("verify@all"))
    assert f"{100 * found['verify@all']['held_out']:.1f} %" in line
    assert "faser profile" not in text


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    data = json.loads(RECORDED.read_text())
    for sample in data["samples"]:
        if sample["kind"] == "draft_rows" and sample["num_requests"] == 1:
            sample["ms"] *= 1.0 + 7.0 * (sample["num_rows"] % 3)
    (tmp_path / "profile.json").write_text(json.dumps(data))
    text = refit(str(tmp_path / "profile.json"))
    assert "left out" in text
    assert "`faser profile` again" in text


@pytest.mark.parametrize(
    "text",
    [
        None,
        "not json",
        "[]",
        "{}",
        '{"samples": []}',
        '{"samples": [{"kind": "verify"}]}',
        '{"samples": [{"kind": "verify", "num_rows": 1, "num_requests": 1, "context_len": 64, "ms": 0}]}',
        '{"samples": [{"kind": "verify", "num_rows": 1, "num_requests": 1, "context_len": 64, "ms": "NaN"}]}',
    ],
)
def test_a_bad_file_is_one_sentence_and_exit_code_2(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["faser", "profile", "--refit", str(path), "--json"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"faser: refit is {path}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "engine_dir is not set"),
        (["--json"], "add --refit FILE"),
        (
            ["--refit", "profile.json", "--num_threads", "7"],
            "num_threads is 7, but --refit measures nothing; leave it out",
        ),
        (["--engine_dir", "x", "--quick", "--prompt_file", "y"], "prompt_file is y, but --quick calibrates nothing"),
    ],
)
def test_without_a_file_an_engine_directory_is_needed(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["faser", "profile", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def engine_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profile, "QUICK_BUDGET_S", 0.05)
    sizes = {"max_batch_size": 2, "max_num_tokens": 32, "max_seq_len": 64, "max_draft_len": 4}
    engine_dir = make_engine_dir(tmp_path, num_layers=1, **sizes)
    measure_once(engine_dir, num_threads=1)
    return engine_dir


def test_a_profile_of_a_build_has_held_out_points_of_every_kind(engine_dir: Path) -> None:
    table = json.loads((engine_dir / PROFILE).read_text())
    assert table["quick"]
    assert {key for key, error in table["errors"].items() if error["held_out"] is not None} == {
        "verify@all",
        "draft_step@all",
        "draft_rows@all",
        "decode@all",
    }
    assert json.loads(refit(str(engine_dir / PROFILE), "--json"))["curves"] == table["errors"]


@pytest.mark.parametrize("worst", [0.01, 0.5])
def test_a_server_warns_and_counts_what_does_not_fit(
    engine_dir: Path, worst: float, caplog: pytest.LogCaptureFixture
) -> None:
    path = engine_dir / PROFILE
    data = json.loads(path.read_text()) | {"warning": ""}
    data["errors"] = {key: vars(CurveError(0.01, worst if key == "verify@all" else 0.02)) for key in data["errors"]}
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING), contextlib.closing(_open(engine_dir)) as executor:
        gauge = executor.stats().get("doubtful_costs_verify", 0.0)
    assert gauge == float(worst > 0.15)
    assert not caplog.records, "whoever only generates text did not ask for it"
    check_engines(ServiceConfig(engine_dir=str(engine_dir), num_threads=1), False, FileHashes())
    warned = [record.getMessage() for record in caplog.records]
    assert [("verify@all is off by 50 %" in sentence) for sentence in warned] == [True] * int(gauge)


def _open(engine_dir: Path):
    return open_executor(engine_dir, ExecutorConfig(speculation="price", num_threads=1))


def test_a_profile_that_does_not_fit_is_said_where_it_is_measured(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`faser build`, `faser profile` and a start that measures all do this; the second measurement is no better."""
    (engine_dir / PROFILE).unlink()
    times = []

    def unsteady(run: object) -> float:
        times.append(1.0 + 50.0 * abs(math.sin(len(times))))
        return times[-1]

    monkeypatch.setattr("faser_trtllm.profiling.probe._milliseconds", unsteady)
    with caplog.at_level(logging.WARNING):
        measure_once(engine_dir, num_threads=1)
    assert any("the cost table does not fit what was measured" in r.getMessage() for r in caplog.records)
    table = CostTable.from_json(json.loads((engine_dir / PROFILE).read_text()))
    assert table.has("verify")
    assert table.doubtful_kinds
