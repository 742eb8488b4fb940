"""A GPU backend's cost table, with the engines on the host: what is measured, what it is valid for, what it leads to.

The times are the host's and mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from faser_trtllm import fingerprint
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.fingerprint import PROFILE, load_costs
from faser_trtllm.profiling import profile
from faser_trtllm.profiling.ensure import measure_once
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import profile_engine_dir
from faser_trtllm.serving.text.offline import generate_all
from tests.engine.cuda.host_executor import HostGpu
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL
from tests.support.policies import choose_policy

PROMPTS = ("The", "def main(", "0, 1, 2, 3,")


class OpenedHostGpu(HostGpu):
    """In place of CudaGpu."""

    def __init__(self, plain_streams: bool = False) -> None:
        """On the host there are no streams of either kind."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def engine_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profile, "QUICK_BUDGET_S", 0.05)
    monkeypatch.setattr("faser_trtllm.engine.cuda.open.CudaGpu", OpenedHostGpu)
    monkeypatch.setattr(fingerprint, "gpu_model", lambda: ("A GPU", "sm_90, driver 13.0", 132))
    monkeypatch.setattr("faser_trtllm.profiling.ensure.gpu_model", lambda: ("A GPU", "sm_90, driver 13.0", 132))
    target, draft = make_pair(tmp_path / "pair", num_layers=3, hidden_size=64, head_dim=64, num_heads=2, num_kv_heads=1)
    sizes = {"max_batch_size": 3, "max_num_tokens": 32, "max_seq_len": 96, "max_draft_len": 3}
    build_engines(BuildOptions(target, draft, tmp_path / "engines", backend="cuda", exit_layers=(1, 2), **sizes))
    return tmp_path / "engines"


def generate(engine_dir: Path, speculation: str) -> list[list[int]]:
    with open_executor(engine_dir, ExecutorConfig(speculation=speculation)) as executor:
        fields = {"max_tokens": 12, "temperature": 0.0, "end_ids": ()}
        return [list(each.token_ids) for each in generate_all(executor, engine_dir, PROMPTS, fields)]


def test_a_quick_table_makes_auto_the_price(engine_dir: Path) -> None:
    """With lanes, segments and exits; it says which GPU it is for, and speculation by it changes no token."""
    assert load_costs(engine_dir, 1) is None
    plain = generate(engine_dir, "off")
    assert measure_once(engine_dir) is not None
    assert measure_once(engine_dir) is None, "a table that fits is measured once"
    table = load_costs(engine_dir, 7)
    assert table is not None, "host threads do not matter to a GPU's table"
    assert (table.fingerprint.cpu_model, table.fingerprint.isa) == ("A GPU", "sm_90, driver 13.0")
    assert table.fingerprint.num_threads == 132
    assert table.num_segments == 3
    assert table.verify_ms(4, 2, 32) > 0
    assert table.exit_ms(1, 4) > 0
    assert choose_policy(engine_dir, "auto", 1, 3, 3).name == "price"
    assert generate(engine_dir, "auto") == plain


def test_another_gpus_table_is_refused_by_name(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_once(engine_dir)
    monkeypatch.setattr(fingerprint, "gpu_model", lambda: ("B GPU", "sm_90, driver 13.0", 132))
    with pytest.raises(ConfigError, match="cpu_model is 'A GPU' there and 'B GPU' here"):
        load_costs(engine_dir, 1)


@ONLY_ALL
def test_a_whole_profile_calibrates_pruning_and_measures_both_streams(engine_dir: Path) -> None:
    report = profile_engine_dir(
        ProfileOptions(engine_dir, time_budget_s=0.2, num_prompts=4, prompt_len=6, max_tokens=24)
    )
    assert {i.verify_partition for i in report.table.interference} == {"verify", "all"}
    assert set(report.table.partitions) == {"all", "verify"}
    assert report.num_exit_observations > 0
    assert (engine_dir / PROFILE).exists()


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "pair", num_layers=1, head_dim=64)
    build_engines(BuildOptions(target, draft, tmp_path / "engines", backend="cuda", max_seq_len=64))
    with pytest.raises(ConfigError, match="finds no CUDA GPU, and GPU backends need one"):
        profile_engine_dir(ProfileOptions(tmp_path / "engines"))
    assert measure_once(tmp_path / "engines") is None
