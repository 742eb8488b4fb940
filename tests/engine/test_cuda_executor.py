"""The whole executor over cuda engines on the host: greedy and seeded tokens bit for bit those without speculation."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cuda_runtime import HostRuntime
from faser_trtllm.engine.cuda_weights import DeviceWeights
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor import cuda_engines
from faser_trtllm.executor.cuda_engines import open_cuda_engines
from faser_trtllm.executor.factory import assemble, open_executor
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair
from faser_trtllm.policy.fixed import FixedPolicy
from faser_trtllm.policy.off import OffPolicy
from faser_trtllm.policy.registry import make_policy
from tests.engine.cuda_exact_ops import ExactOps
from tests.engine.cuda_harness import build_pair
from tests.executor.harness import Collector, ErraticPolicy, toy_costs

MAX_BATCH_SIZE = 4
MAX_DRAFT_LEN = 4
POLICIES = [
    "fixed:1",
    "fixed:4",
    "fixed:3:draft_ahead",
    "fixed:3:ping_pong",
    "erratic",
    "price:prune=on",
    "price:mode=draft_ahead",
    "price:mode=ping_pong,prune=on",
]


class HostGpu:
    """Partitions that are names, and exact arithmetic."""

    whole = GpuPartition("whole", 1, 132)
    pair = PartitionPair(GpuPartition("draft", 2, 32), GpuPartition("target", 3, 100))

    def make_runtime(self):
        return HostRuntime()

    def load_weights(self, file, runtime):
        return DeviceWeights.load(file, runtime.device, torch.float32)

    def make_ops(self, runtime, head_dim):
        return ExactOps()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300, hidden_size=32)


def make(policy: str):
    if policy == "off":
        return OffPolicy()
    if policy == "erratic":
        return ErraticPolicy(MAX_DRAFT_LEN, 0)
    if policy.startswith("fixed"):
        _, length, *mode = policy.split(":")
        return FixedPolicy(int(length), Mode(mode[0]) if mode else Mode.SERIAL)
    return make_policy(policy, MAX_DRAFT_LEN, toy_costs(), MAX_BATCH_SIZE)


def generate(engines: EngineDir, policy: str, requests, max_batch_size=MAX_BATCH_SIZE, max_num_tokens=32):
    """-> tokens by request, and the executor's statistics."""
    drafting = policy != "off"
    limits = BuildConfig(max_batch_size, max_num_tokens, 128, MAX_DRAFT_LEN if drafting else 0, 32)
    clock, collector = ManualClock(), Collector()
    with ExitStack() as stack:
        opened = open_cuda_engines(engines, limits, 24, drafting, HostGpu(), stack)
        executor = assemble(
            opened.target,
            opened.draft,
            make(policy),
            ExecutorConfig(max_queue_size=10_000),
            max_seq_len=128,
            max_draft_len=limits.max_draft_len,
            clock=clock,
            resources=stack.pop_all(),
            enter_mode=opened.enter_mode,
            device_tester=opened.tester,
        )
        with executor:
            for index, (prompt, params) in enumerate(requests):
                executor.submit(str(index), prompt, params, collector.sink(str(index)))
            while executor.step():
                clock.advance(0.001)
            executor.check_integrity()
            found = executor.stats()
    return [collector.tokens[str(i)] for i in range(len(requests))], found


def mixed_requests():
    rng = np.random.default_rng(3)
    requests = []
    for index in range(7):
        prompt = rng.integers(0, 300, 3 + 9 * index).tolist()
        seed = None if index % 2 == 0 else 1000 + index
        params = SamplingParams(
            max_tokens=12 + index,
            temperature=0.0 if seed is None else 0.7,
            seed=seed,
            top_p=0.9 if index == 3 else None,
            repetition_penalty=1.2 if index == 5 else 1.0,
            bad_words=((5, 6), (7,)) if index == 4 else (),
            end_ids=(2,),
            min_tokens=3,
        )
        requests.append((prompt, params))
    return requests


@pytest.fixture(scope="module")
def alone(engines: EngineDir):
    """Tokens without speculation, one request at a time."""
    return generate(engines, "off", mixed_requests(), max_batch_size=1, max_num_tokens=128)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_on_the_device_changes_nothing(engines: EngineDir, alone, policy: str) -> None:
    tokens, found = generate(engines, policy, mixed_requests())
    assert tokens == alone
    assert found["num_accepted_tokens"] > 0 or policy.startswith("price")
    for mode in ("draft_ahead", "ping_pong"):
        if policy in (f"fixed:3:{mode}", "erratic"):
            assert found[f"num_steps_{mode}"] > 0
    if policy == "erratic":
        assert found["num_pruned_rows"] > 0
