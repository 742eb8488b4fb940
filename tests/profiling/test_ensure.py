"""A cost table for this machine, made where it is missing: after a build, and before engines are opened."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig, ServiceConfig
from faser_trtllm.errors import ConfigError
from faser_trtllm.fingerprint import PROFILE, load_costs
from faser_trtllm.profiling import ensure, profile
from faser_trtllm.profiling.ensure import DISTURBED_S, ensure_profile, measure_once
from faser_trtllm.serving.engine_process.opening import open_engine_dir
from faser_trtllm.serving.launch.hashes import FileHashes
from faser_trtllm.serving.launch.options import check_engines
from tests.support.checkpoints import make_pair
from tests.support.policies import choose_policy


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "QUICK_BUDGET_S", 0.05)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), num_layers=1)


@pytest.fixture
def engine_dir(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    sizes = {"max_batch_size": 2, "max_num_tokens": 32, "max_seq_len": 64, "max_draft_len": 4}
    build_engines(BuildOptions(*pair, tmp_path / "engines", **sizes))
    return tmp_path / "engines"


def config(speculation: str) -> ExecutorConfig:
    return ExecutorConfig(speculation=speculation, num_threads=1)


def measured(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about measuring; other loggers say that a machine is busy."""
    return [record.getMessage() for record in caplog.records if record.name == ensure.__name__]


def policy_of(engine_dir: Path, speculation: str = "auto") -> str:
    return choose_policy(engine_dir, speculation, 1, 4, 2).name


def move_to_another_machine(path: Path) -> None:
    data = json.loads(path.read_text())
    data["fingerprint"]["cpu_model"] = "another processor"
    path.write_text(json.dumps(data))


def test_it_is_measured_once(engine_dir: Path) -> None:
    assert policy_of(engine_dir) == "fixed:4"
    assert measure_once(engine_dir, num_threads=1) is not None
    written = (engine_dir / PROFILE).read_bytes()
    assert measure_once(engine_dir, num_threads=1) is None
    assert (engine_dir / PROFILE).read_bytes() == written
    assert policy_of(engine_dir).startswith("price")
    EngineDir.load(engine_dir, verify_hashes=True)


def test_a_table_of_another_machine_is_kept_beside_a_new_one(
    engine_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measure_once(engine_dir, num_threads=1)
    move_to_another_machine(engine_dir / PROFILE)
    theirs = (engine_dir / PROFILE).read_bytes()
    with pytest.raises(ConfigError, match="another processor"):
        load_costs(engine_dir, 1)
    ensure_profile(engine_dir, config("auto"))
    assert len(measured(caplog)) == 1
    assert "'another processor' there" in caplog.text
    assert "measured for this machine in" in caplog.text
    assert (engine_dir / PROFILE).read_bytes() == theirs
    assert policy_of(engine_dir).startswith("price")
    for speculation in ("auto", "price", "price:mode=serial"):
        ensure_profile(engine_dir, config(speculation))
    assert len(measured(caplog)) == 1, "it was measured again"
    EngineDir.load(engine_dir, verify_hashes=True)


def test_other_threads_are_another_machine(engine_dir: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core only")
    measure_once(engine_dir, num_threads=2)
    ensure_profile(engine_dir, config("price"))
    assert load_costs(engine_dir, 1) is not None
    assert load_costs(engine_dir, 2) is not None


def test_a_damaged_table_is_made_good(engine_dir: Path) -> None:
    (engine_dir / PROFILE).write_text("{}")
    ensure_profile(engine_dir, config("auto"))
    assert policy_of(engine_dir).startswith("price")


def disturb(path: Path, age_s: float, **fields: object) -> None:
    """Make it a table that was measured beside other work so long ago."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"warning": "other work"} | fields))
    os.utime(path, (time.time() - age_s,) * 2)


def test_a_table_measured_beside_other_work_is_replaced_at_a_later_start(
    engine_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measure_once(engine_dir, num_threads=1)
    path = engine_dir / PROFILE
    disturb(path, DISTURBED_S / 2)
    ensure_profile(engine_dir, config("auto"))
    assert not measured(caplog), "it was measured again at once"
    disturb(path, 2 * DISTURBED_S)
    ensure_profile(engine_dir, config("auto"))
    assert measured(caplog)[0].startswith(f"{path} was measured while other work slowed this machine; measured")
    assert json.loads(path.read_text())["warning"] != "other work"
    ensure_profile(engine_dir, config("auto"))
    assert len(measured(caplog)) == 1
    assert [table.name for table in engine_dir.glob("profile*")] == [PROFILE]


def test_a_restart_takes_the_table_that_is_there(engine_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients wait for it, and it would measure next to them. An engine process may always be one."""
    measure_once(engine_dir, num_threads=1)
    disturb(engine_dir / PROFILE, 2 * DISTURBED_S)
    service = ServiceConfig(engine_dir=str(engine_dir), num_threads=1)
    check_engines(service, False, FileHashes(), is_restart=True)
    executor, _ = open_engine_dir(engine_dir, service)
    with contextlib.closing(executor):
        assert not measured(caplog)
    check_engines(service, False, FileHashes())
    assert len(measured(caplog)) == 1


def test_engines_that_cannot_be_read_are_left_to_who_opens_them(
    engine_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measure_once(engine_dir, num_threads=1)
    os.truncate(engine_dir / "target" / "rank0.engine", 100)
    ensure_profile(engine_dir, config("auto"))
    assert not measured(caplog)


def test_a_full_table_is_not_replaced_by_a_quick_one(engine_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has exits, lanes and errors, which a start does not measure: whoever asked for it may do so again."""
    measure_once(engine_dir, num_threads=1)
    disturb(engine_dir / PROFILE, 2 * DISTURBED_S, quick=False)
    ensure_profile(engine_dir, config("price"))
    assert not measured(caplog)
    assert json.loads((engine_dir / PROFILE).read_text())["warning"] == "other work"


def test_such_a_table_beside_another_machines_is_replaced_too(engine_dir: Path) -> None:
    measure_once(engine_dir, num_threads=1)
    move_to_another_machine(engine_dir / PROFILE)
    theirs = (engine_dir / PROFILE).read_bytes()
    measure_once(engine_dir, num_threads=1)
    (ours,) = engine_dir.glob("profile-*.json")
    disturb(ours, 2 * DISTURBED_S)
    ensure_profile(engine_dir, config("price"))
    assert json.loads(ours.read_text())["warning"] != "other work"
    assert (engine_dir / PROFILE).read_bytes() == theirs


@pytest.mark.parametrize("speculation", ["off", "fixed:2", "schedule:1=2", "gp_lcb", "auto"])
def test_nothing_is_measured_for_what_goes_without_a_table(engine_dir: Path, speculation: str) -> None:
    ensure_profile(engine_dir, config(speculation))
    assert not list(engine_dir.glob("profile*"))


def test_price_gets_its_first_table(engine_dir: Path) -> None:
    ensure_profile(engine_dir, config("price"))
    assert policy_of(engine_dir, "price").startswith("price")


def test_a_service_starts_with_price_on_another_machine(engine_dir: Path) -> None:
    measure_once(engine_dir, num_threads=1)
    move_to_another_machine(engine_dir / PROFILE)
    service = ServiceConfig(engine_dir=str(engine_dir), speculation="price", num_threads=1)
    check_engines(service, False, FileHashes())
    move_to_another_machine(next(engine_dir.glob("profile-*.json")))
    executor, _ = open_engine_dir(engine_dir, service)
    with contextlib.closing(executor):
        assert load_costs(engine_dir, 1) is not None


def test_a_directory_that_cannot_be_written_is_served_with_fixed_4(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measure_once(engine_dir, num_threads=1)
    move_to_another_machine(engine_dir / PROFILE)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write wherever it likes
    before = sorted(engine_dir.iterdir())
    ensure_profile(engine_dir, config("auto"))
    assert policy_of(engine_dir) == "fixed:4"
    assert caplog.text.count("speculating with fixed:4") == 1
    assert not measured(caplog)
    assert sorted(engine_dir.iterdir()) == before


def test_what_cannot_be_measured_is_logged_and_does_not_stop_the_start(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    (engine_dir / PROFILE).write_text("{}")
    monkeypatch.setattr(Path, "replace", fail)  # of the written table, into its place
    with caplog.at_level(logging.WARNING):
        ensure_profile(engine_dir, config("auto"))
    assert "no space left" in caplog.text


def test_of_several_processes_one_measures(engine_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from faser_trtllm.profiling.ensure import measure_once\n"
        "print(measure_once(Path(sys.argv[1]), num_threads=1) is not None)"
    )
    command = [sys.executable, "-c", code, str(engine_dir)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sorted(said) == ["False", "False", "True"]
    assert not list(engine_dir.glob("*.tmp"))


def faser_build(pair: tuple[Path, Path], output: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "faser_trtllm.cli", "build", "--checkpoint_dir", str(pair[0])),
        *("--draft_checkpoint_dir", str(pair[1]), "--output_dir", str(output), "--max_seq_len", "64"),
        *("--max_batch_size", "2", "--max_num_tokens", "32", *flags),
    ]


def test_build_profiles_unless_told_otherwise(pair: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "engines"

    def build(*flags: str) -> str:
        done = subprocess.run(faser_build(pair, output, *flags), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "profiled" not in build("--dry_run")
    assert not output.exists()
    assert "profiled" not in build("--no_profile")
    assert not (output / PROFILE).exists()
    assert "profiled in" in build()
    assert (output / PROFILE).exists()
    assert "profiled" not in build(), "an up-to-date build with a table that fits was measured again"


def test_ctrl_c_during_the_profile_leaves_the_engines(pair: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "engines"
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from faser_trtllm.profiling import profile\n"
        "measure_quickly = profile.measure_quickly\n"
        "def measure_without_end(*args, **options):\n"
        "    print('measuring', file=sys.stderr, flush=True)\n"
        "    while True: measure_quickly(*args, **options)\n"
        "profile.measure_quickly = measure_without_end\n"
        "from faser_trtllm.cli import main; main()\n"
    )
    command = [sys.executable, "-c", code, *faser_build(pair, output)[3:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        assert build.stderr.readline().startswith("built ")
        assert any(line == "measuring\n" for line in build.stderr), "the build ended without a profile"
        build.send_signal(signal.SIGINT)
        said = build.stderr.read()
        assert build.wait(60) == 130
    assert "faser profile --quick" in said
    EngineDir.load(output, verify_hashes=True)
    assert not list(output.glob("profile*"))
