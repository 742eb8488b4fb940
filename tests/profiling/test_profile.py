"""`faser profile` on a tiny pair; no time is asserted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import DrafterName
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.fingerprint import PROFILE, fingerprint_of
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import profile_engine_dir
from faser_trtllm.profiling.report import error_lines
from tests.support.checkpoints import make_pair
from tests.support.engine_dirs import make_engine_dir
from tests.support.policies import choose_policy


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128, "max_draft_len": 4}
    return make_engine_dir(tmp_path_factory.mktemp("profile"), num_layers=3, exit_layers=(1, 2), **sizes)


@pytest.fixture
def options(engine_dir: Path) -> ProfileOptions:
    (engine_dir / PROFILE).unlink(missing_ok=True)
    return ProfileOptions(engine_dir, time_budget_s=0.2, num_prompts=8, prompt_len=8, max_tokens=48)


def test_engines_of_few_short_requests_have_a_profile(tmp_path: Path) -> None:
    """Their exits are measured with as many rows as elsewhere, which leaves less room for context."""
    target, draft = make_pair(tmp_path / "pair", num_layers=2)
    limits = {"max_batch_size": 2, "max_num_tokens": 32, "max_seq_len": 64, "max_draft_len": 4}
    build_engines(BuildOptions(target, draft, tmp_path / "engines", exit_layers=(1,), **limits))
    options = ProfileOptions(tmp_path / "engines", time_budget_s=0.1, num_prompts=2, prompt_len=8)
    assert profile_engine_dir(options, lambda what, done, total: None).table.num_segments == 2


def test_profile_is_whole_and_loads(options: ProfileOptions) -> None:
    stages: list[str] = []
    report = profile_engine_dir(options, lambda what, done, total: stages.append(what))
    with CoreSet() as cores:
        fingerprint = fingerprint_of(options.engine_dir, cores.num_threads)
    table = CostTable.load(options.engine_dir / PROFILE, fingerprint)
    assert table == report.table
    judged = {key for key, error in table.errors.items() if error.held_out is not None}
    assert judged == {"verify@all", "draft_step@all", "draft_rows@all", "decode@all"}
    assert table.num_segments == 3
    assert table.verify_ms(4, 2, 32) > 0
    assert table.draft_step_ms(2, 32) > 0
    assert {boundary.boundary for boundary in table.exits} <= {1, 2}
    assert report.num_exit_observations > 0
    assert {"passes", "segments", "decoding prompts"} <= set(stages)
    assert any("draft_rows@all" in line and "%" in line for line in error_lines(report.table.errors))
    data = json.loads((options.engine_dir / PROFILE).read_text())
    assert len(data["held_out"]) == len(report.held_out)
    assert not list(options.engine_dir.glob("*.tmp"))


def test_prompt_file_is_used_and_checked(options: ProfileOptions, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(InvalidArgumentError, match=r"missing\.txt"):
        profile_engine_dir(
            replace(options, prompt_file=tmp_path / "missing.txt"), lambda what, done, total: told.append(what)
        )
    assert told == [], "nothing was measured before"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(first, second):\n\nreturn first\n" * 4)
    report = profile_engine_dir(replace(options, prompt_file=prompts))
    assert report.num_exit_observations > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"time_budget_s": 0.0}, "time_budget_s is 0"),
        ({"num_prompts": 0}, "num"),
    ],
)
def test_wrong_options(options: ProfileOptions, change: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        profile_engine_dir(replace(options, **change))


def test_a_target_alone_has_no_costs_of_drafting(tmp_path: Path) -> None:
    target, _ = make_pair(tmp_path / "pair", num_layers=2)
    build_engines(BuildOptions(target, None, tmp_path / "engines", max_seq_len=64, max_batch_size=2, max_num_tokens=32))
    report = profile_engine_dir(ProfileOptions(tmp_path / "engines", quick=True, num_threads=1))
    assert set(report.table.errors) == {"verify@all", "decode@all"}
    policy = choose_policy(tmp_path / "engines", "auto", 1, 8, 2, drafters=(DrafterName.SUFFIX,))
    assert policy.name == "price"
    with pytest.raises(ConfigError, match="no draft model to measure"):
        choose_policy(tmp_path / "engines", "schedule", 1, 8, 2, drafters=(DrafterName.SUFFIX,))


def test_nothing_to_profile_without_drafts(tmp_path: Path) -> None:
    target, _ = make_pair(tmp_path / "pair", num_layers=2)
    build_engines(BuildOptions(target, None, tmp_path / "engines", max_seq_len=64, max_draft_len=0))
    with pytest.raises(ConfigError, match="max_draft_len 0"):
        profile_engine_dir(ProfileOptions(tmp_path / "engines"))
