"""Token trees on the virtual GPU: the same tokens, and reads as without branches but for an array more of each draft
call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import KvCacheDtype
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.gpu.device import CudaGpu
from tests.engine.cuda.branched import Tree
from tests.engine.cuda.harness import HEADS, build_pair, build_with_head, open_engine
from tests.engine.cuda.host_executor import MAX_BATCH_SIZE
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.generation import generate_cuda
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

TEST, DRAFTS = "engine/gpu/sampler/accept:sample", "engine/gpu/sampler/draft_state:read"
# For page-locked memory whose last copy is long done, where edits first need more memory, and at the end.
OTHER_WAITS = ("engine/gpu/staging:fill", "engine/gpu/sampler/upload:send", "engine/gpu/engine:close")
EDITS = {"repetition_penalty": 1.2, "bad_words": ((5, 6), (7,)), "logit_bias": ((8, 1.5),), "min_tokens": 3}
# Greedy or seeded in turn. Prompts fit attention's narrow tile, since the wide one's sums differ in the last bit, and
# all of them the first step, so that every step verifies.
REQUESTS = [
    (
        [7 * i + j for j in range(3 + i)],
        SamplingParams(
            max_tokens=pick(12, 20), end_ids=(), temperature=0.7 * (i % 2), seed=i, **(EDITS if i > 1 else {})
        ),
    )
    for i in range(MAX_BATCH_SIZE)
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300)


@pytest.fixture(scope="module")
def alone(gpu: VirtualGpuProcess, engines: EngineDir) -> Callable[[KvCacheDtype], list[list[int]]]:
    """Tokens without speculation."""

    @functools.cache
    def tokens(kv_dtype: KvCacheDtype) -> list[list[int]]:
        return gpu.run(generate_cuda, engines, "off", REQUESTS, kv_dtype=kv_dtype).tokens

    return tokens


@pytest.mark.parametrize("kv_dtype", pick([KvCacheDtype.AUTO], list(KvCacheDtype)))
def test_the_text_is_that_of_chains_and_the_host_reads_as_often(
    gpu: VirtualGpuProcess,
    engines: EngineDir,
    alone: Callable[[KvCacheDtype], list[list[int]]],
    kv_dtype: KvCacheDtype,
) -> None:
    found = gpu.run(generate_cuda, engines, "fixed:3", REQUESTS, kv_dtype=kv_dtype, num_branches=2)
    assert found.tokens == alone(kv_dtype)
    assert 0 < found.stats["num_branch_tokens"] < found.stats["num_branch_rows"]
    reads, waits = found.counters.reads(), found.counters.waits
    assert reads.keys() == {TEST, DRAFTS}
    assert waits.keys() <= {f"wait {place}" for place in (TEST, DRAFTS, *OTHER_WAITS)}
    assert reads[TEST][0] == waits[f"wait {TEST}"] == found.stats["num_steps"]
    num_calls = waits[f"wait {DRAFTS}"]
    assert reads[DRAFTS][0] == 4 * num_calls, "tokens, margins, candidates, runners-up"
    assert 0 < num_calls <= found.stats["num_steps"]
    kernels = found.counters.kernels("whole")
    assert 0 < kernels["copy_kv"] <= 2 * found.stats["num_steps"], "one launch over all layers, before and after a pass"


def _rows_and_chains(engines: EngineDir) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Logits of branches of two requests around the end of a block, in a captured pass; and of a chain, row by row."""
    driver().seed(2)
    texts = np.random.default_rng(0).integers(0, 300, (2, 40)).tolist()
    branches = [(0, 29, 1), (0, 31, 2), (0, 33, 3), (1, 32, 4), (1, 35, 5)]
    with CudaGpu() as gpu:
        runtime = gpu.make_runtime()
        options = {"runtime": runtime, "partition": gpu.whole, "max_num_branches": 5, "num_blocks": 64}
        ops = gpu.make_ops(runtime, 64)
        with open_engine(engines.target_path, ops, torch.bfloat16, **options) as engine:
            engine.capture_graphs([gpu.whole])
            plain, tree, wanted = Harness(engine, seed=9), Tree(engine), []
            for entry, position, token in branches:
                said = [*texts[entry][:position], token]
                wanted.append([plain.run([(0, said, i, i + 1)])[0][0] for i in range(position + 1)][-1])
            for start in range(0, 28, 7):
                tree.harness.run([(slot, text, start, start + 7) for slot, text in enumerate(texts)])
            found = tree.run([(slot, text, 28, 36) for slot, text in enumerate(texts)], branches)
            return found[16:], np.array(wanted)


def test_a_branch_row_has_the_bits_of_a_chain_row(gpu: VirtualGpuProcess, engines: EngineDir) -> None:
    found, wanted = gpu.run(_rows_and_chains, engines)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("policy", ["erratic", *pick([], ["fixed:4"])])
def test_modes_and_pruned_passes_beside_trees(
    gpu: VirtualGpuProcess, engines: EngineDir, alone: Callable[[KvCacheDtype], list[list[int]]], policy: str
) -> None:
    found = gpu.run(generate_cuda, engines, policy, REQUESTS, seed=3, num_branches=2)
    assert found.tokens == alone(KvCacheDtype.AUTO)
    assert found.stats["num_branch_rows"] > 0


@pytest.mark.parametrize("kind", pick(["eagle3"], list(HEADS)))
def test_heads_beside_trees(gpu: VirtualGpuProcess, tmp_path: Path, kind: str) -> None:
    engines = build_with_head(tmp_path, exit_layers=(2,), **HEADS[kind])
    alone = gpu.run(generate_cuda, engines, "off", REQUESTS)
    for policy in (*pick([], ["fixed:4"]), "erratic"):
        found = gpu.run(generate_cuda, engines, policy, REQUESTS, seed=1, num_branches=3)
        assert found.tokens == alone.tokens
        assert found.stats["num_branch_rows"] > 0
