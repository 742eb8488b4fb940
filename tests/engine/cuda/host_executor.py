"""The whole executor over cuda engines on the host."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import DrafterName, ExecutorConfig, KvCacheDtype, Quantization
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.executor.factory import assemble
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.policy.static import FixedPolicy, OffPolicy
from lab.clock import ManualClock
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import emulated_rows
from tests.support.doubtful import doubtful_drafts
from tests.support.effort import pick
from tests.support.executor_harness import Collector, ErraticPolicy, toy_costs

MAX_BATCH_SIZE = 4
MAX_DRAFT_LEN = 4


class HostGpu:
    """Partitions that are names, and exact arithmetic."""

    whole = GpuPartition("whole", 1, 132)
    compute_capability = "9.0"
    weights_dtype = torch.float32
    collectives = "gloo"
    num_free_bytes = 1 << 40
    pair = PartitionPair(GpuPartition("draft", 2, 32), GpuPartition("target", 3, 100))

    def of_rank(self, rank):
        return type(self), {"OMP_NUM_THREADS": "1"}

    def make_runtime(self):
        return HostRuntime()

    def check_quantization(self, runtime, quantization):
        pass

    def free_bytes(self):
        return self.num_free_bytes

    def make_ops(self, runtime, head_dim, deterministic=False, has_mxfp4=False):
        return ExactOps()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


class KernelAcceptGpu(HostGpu):
    """Rejection sampling and the draws by the kernels, emulated."""

    def make_ops(self, runtime, head_dim, deterministic=False, has_mxfp4=False):
        ops = ExactOps()
        kernels = Ops({stem: emulated_rows(stem) for stem in ("accept", "sample")}, lambda: 0, num_sms=4)
        ops.accept, ops.sample, ops.advance = kernels.accept, kernels.sample, kernels.advance
        return ops


def make(policy: str, drafters=(DrafterName.MODEL,)):
    if policy == "off":
        return OffPolicy()
    if policy == "erratic":
        return ErraticPolicy(MAX_DRAFT_LEN, 0)
    if policy.startswith("fixed"):
        _, length, *mode = policy.split(":")
        return FixedPolicy(int(length), Mode(mode[0]) if mode else Mode.SERIAL)
    return make_policy(policy, MAX_DRAFT_LEN, toy_costs(), MAX_BATCH_SIZE, drafters)


def generate(
    engines: EngineDir,
    policy: str,
    requests,
    gpu=None,
    max_batch_size=MAX_BATCH_SIZE,
    max_num_tokens=32,
    num_blocks=24,
    max_seq_len=128,
    quantization=Quantization.NONE,
    kv_dtype=KvCacheDtype.AUTO,
    collector=None,
    num_branches=0,
    deterministic=False,
    opened_all=lambda: None,
    on_step=lambda executor, step: None,
    drafters="model",
    **config,
):
    """Return tokens by request, and the executor's statistics.

    opened_all: called before the first request; on_step: after each step. drafters: names with commas between them.
    """
    drafters = tuple(map(DrafterName, drafters.split(",")))
    drafting = policy != "off" and DrafterName.MODEL in drafters
    limits = BuildConfig(max_batch_size, max_num_tokens, max_seq_len, 0 if policy == "off" else MAX_DRAFT_LEN, 32)
    clock, collector = ManualClock(), collector or Collector()
    with ExitStack() as stack:
        request = OpenRequest(
            engines,
            limits,
            num_blocks,
            drafting,
            quantization=quantization,
            kv_dtype=kv_dtype,
            num_branches=num_branches,
            deterministic=deterministic,
        )
        opened = open_cuda_engines(request, gpu or HostGpu(), stack)
        with doubtful_drafts():
            executor = assemble(
                opened.target,
                opened.draft,
                make(policy, drafters),
                ExecutorConfig(max_queue_size=10_000, drafters=drafters, num_branches=num_branches, **config),
                max_seq_len=max_seq_len,
                max_draft_len=limits.max_draft_len,
                clock=clock,
                resources=stack.pop_all(),
                enter_mode=opened.enter_mode,
                sampler=opened.sampler,
                copy_kv=opened.copy_kv,
            )
        with executor:
            opened_all()
            for index, (prompt, params) in enumerate(requests):
                executor.submit(str(index), prompt, params, collector.sink(str(index)))
            step = 0
            while executor.step():
                clock.advance(0.001)
                on_step(executor, step := step + 1)
            executor.check_integrity()
            found = executor.stats()
    return [collector.tokens[str(i)] for i in range(len(requests))], found


def repeating_requests():
    """Return mixed_requests with edits, with prompts and outputs that repeat themselves across the end of a block."""
    requests = []
    for prompt, params in mixed_requests(True):
        top_p = None if params.seed is None else 0.1
        requests.append(((prompt[:8] * 20)[:60], replace(params, max_tokens=pick(32, 50), end_ids=(), top_p=top_p)))
    return requests


def mixed_requests(has_edits: bool):
    """Greedy and seeded in turn."""
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
            repetition_penalty=1.2 if has_edits and index == 5 else 1.0,
            bad_words=((5, 6), (7,)) if has_edits and index == 4 else (),
            logit_bias=((8, 1.5), (9, -2.0)) if has_edits and index == 3 else (),
            end_ids=(2,),
            min_tokens=3 if has_edits and index == 2 else 0,
        )
        requests.append((prompt, params))
    return requests
