"""Tests of assemble()'s checks on engines that are already open."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.engine.opening import stay
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import assemble, open_executor
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.static import FixedPolicy
from lab.clock import ManualClock
from tests.support.checkpoints import make_pair
from tests.support.executor_harness import Collector


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("apart", [False, True])
def test_lanes_overlap_only_where_the_opener_says_how(tmp_path: Path, mode: Mode, apart: bool) -> None:
    target, draft = make_pair(tmp_path / "pair", num_layers=1)
    engines = build_engines(BuildOptions(target, draft, tmp_path / "engines", max_seq_len=64))
    assert engines is not None
    collector = Collector()
    with ExitStack() as stack:
        first = stack.enter_context(CoreSet(None, 1))
        second = stack.enter_context(CoreSet(None, 1)) if apart else first
        sizes = {"num_blocks": 8, "tokens_per_block": 32, "max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 64}
        opened = [
            stack.enter_context(CpuEngine.open(path, core_set, **sizes))
            for path, core_set in ((engines.target_path, first), (engines.draft_path, second))
        ]
        executor = assemble(
            *opened,
            FixedPolicy(2, mode),
            ExecutorConfig(),
            max_seq_len=64,
            max_draft_len=2,
            clock=ManualClock(),
            **({"enter_mode": stay} if apart else {}),
        )
        with executor:
            executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=6), collector.sink("a"))
            if not apart and mode is not Mode.SERIAL:
                with pytest.raises(
                    ConfigError, match=f"mode is {mode.value}, but nothing moves target and draft apart"
                ):
                    drain(executor)
            else:
                drain(executor)
                assert len(collector.tokens["a"]) == 6


def drain(executor) -> None:
    while executor.step():
        pass


@pytest.mark.parametrize(("num_branches", "wanted"), [(0, 0), (2, 2), (16, 3)])
def test_branches_have_memory_for_one_in_the_place_of_each_draft(
    tmp_path: Path, num_branches: int, wanted: int
) -> None:
    engines = build_engines(BuildOptions(*make_pair(tmp_path / "pair", num_layers=1), tmp_path / "engines"))
    assert engines is not None
    held = {}

    def note(engine: Engine, role: str) -> Engine:
        held[role] = engine.spec.max_num_branches
        return engine

    limits = {"max_batch_size": 2, "max_draft_len": 3, "num_threads": 1}
    config = ExecutorConfig(speculation="fixed:3", num_branches=num_branches, **limits)
    with open_executor(engines.path, config, wrap_engine=note):
        assert held == {"target": 2 * wanted, "draft": 0}
