"""Token trees on the cuda engine: a branch's row has the bits of a chain's, and no text changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.config import KvCacheDtype
from faser_trtllm.engine.cuda.engine import load_weights, make_engine
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from tests.engine.cuda.branched import Tree, check_copied_kv, check_rows, random_texts
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import (
    HEADS,
    WHOLE,
    build_moe_pair,
    build_pair,
    build_with_head,
    emulated_rows,
    open_engine,
)
from tests.engine.cuda.host_executor import HostGpu, generate, mixed_requests
from tests.ops.cuda.emulation import emulated
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.support.published_mixtures import publish

pytestmark = pytest.mark.slow

POLICIES = [
    "fixed:3",
    "erratic",
    *pick([], ["fixed:1", "fixed:4", "fixed:3:ping_pong", "price:prune=on", "price:mode=draft_ahead"]),
    "price:prune=off",
]
OPTIONS = {"tokens_per_block": 16, "max_num_branches": 5, "num_blocks": 96}
FP8 = KvCacheDtype.FP8


class KernelGpu(HostGpu):
    """Emulates the kernels that branches add: draws with their runners-up, tests and copies."""

    def make_ops(self, runtime, head_dim, deterministic=False, has_mxfp4=False):
        ops = ExactOps()
        launchers = {stem: emulated_rows(stem) for stem in ("accept", "sample")} | {"copy_kv": emulated("copy_kv")}
        kernels = Ops(launchers, lambda: 0, num_sms=4)
        for name in ("accept", "sample", "advance", "copy_kv"):
            setattr(ops, name, getattr(kernels, name))
        return ops


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("num_known", [20, *pick([], [31, 33, 47]), 32])
def test_a_branch_row_has_the_bits_of_a_chain_row(engines, num_known: int, captures: bool) -> None:
    """Around the ends of blocks, in graphs and without."""
    with open_engine(engines.target_path, **OPTIONS) as engine:
        check_rows(engine, num_known, lambda: captures and engine.capture_graphs([WHOLE]))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_a_branch_row_of_a_mixture_has_the_bits_of_a_chain_row(tmp_path: Path, family: str) -> None:
    """Also where all heads are normed before append_kv, which only takes branches with a norm."""
    if family == "olmoe":
        publish(tmp_path / "checkpoints/target", "olmoe", dtype="bfloat16", hidden_size=256, attention_bias=True)
    engines = build_moe_pair(tmp_path, family)
    with open_engine(engines.target_path, **OPTIONS) as engine:
        check_rows(engine, 20, lambda: engine.capture_graphs([WHOLE]))


def test_heads_that_are_normed_already_are_not_scaled_by_the_kernel(tmp_path: Path) -> None:
    """append_kv, emulated: rows of ones change no bit of OLMoE's products."""
    publish(tmp_path / "checkpoints/target", "olmoe", dtype="bfloat16", hidden_size=256, attention_bias=True)
    engines = build_moe_pair(tmp_path, "olmoe")
    kernels, found = Ops({"append_kv": emulated("append_kv")}, lambda: 0, num_sms=4), []
    for append_kv in (kernels.append_kv, lambda *inputs: kernels.append_kv(*inputs[:4], None)):
        ops = ReferenceOps()
        ops.append_kv = append_kv
        with open_engine(engines.target_path, ops, torch.bfloat16) as engine:
            found.append(Harness(engine).run([(2, random_texts(1, 20, 1)[0], 0, 18)])[0].tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_dtype", KvCacheDtype)
def test_kv_that_is_copied_back_goes_on_as_the_chain_would(engines, kv_dtype: KvCacheDtype) -> None:
    with open_engine(engines.target_path, kv_dtype=kv_dtype, **OPTIONS) as engine:
        check_copied_kv(engine)


@pytest.mark.parametrize("kv_dtype", KvCacheDtype)
def test_the_kernels_do_what_their_references_do(engines, kv_dtype: KvCacheDtype) -> None:
    """append_kv, verify_attention and copy_kv themselves, emulated, in a bf16 engine."""
    texts, found = random_texts(2, 40, 3), []
    stems = {stem: emulated(stem) for stem in ("append_kv", "copy_kv")}
    kernels = Ops(
        stems | {"verify_attention": emulated("verify_attention", {"FASER_HEAD_DIM": 64})}, lambda: 0, num_sms=4
    )
    ops = ReferenceOps()
    for name in ("append_kv", "copy_kv", "verify_attention"):
        setattr(ops, name, getattr(kernels, name))
    for each in (ReferenceOps(), ops):
        with open_engine(engines.target_path, each, torch.bfloat16, kv_dtype=kv_dtype, **OPTIONS) as engine:
            tree = Tree(engine)
            tree.harness.run([(slot, text, 0, 29) for slot, text in enumerate(texts)])
            rows = [(slot, text, 29, 35) for slot, text in enumerate(texts)]
            found.append(tree.run(rows, [(0, 31, 5), (0, 34, 6), (1, 33, 7)]))
    assert (found[0] - found[1]).std() < 0.02 * found[0].std()


def test_what_is_no_branch_is_refused(engines) -> None:
    rows = [(0, [1, 2, 3], 0, 3), (1, [4], 0, 1)]
    with open_engine(engines.target_path) as engine:
        batch = replace(Harness(engine).batch(rows), branch_parents=np.zeros(1, np.int32))
        with pytest.raises(InvalidArgumentError, match=r"branches have \[1\] rows, the engine allows 0"):
            engine.forward(batch)
    with open_engine(engines.target_path, **OPTIONS) as engine:
        tree = Tree(engine)
        batch = tree.harness.batch(rows)
        engine.forward(replace(batch, branch_parents=np.array([0], np.int32)))
        for parent in (-1, 1):
            with pytest.raises(
                InvalidArgumentError, match=r"branch_parents is .*; it must be ascending and within 0 to 0"
            ):
                engine.forward(replace(batch, branch_parents=np.array([parent], np.int32)))
        with pytest.raises(InvalidArgumentError, match=r"branches have \[3, 1\] rows"):
            engine.forward(replace(batch, branch_parents=np.array([0, 0], np.int32)))
        for copies in ((0, 10**6, 0, 1), (-1, 0, 0, 1), (0, 1, 3, 2), (0, 1, 0, 17)):
            with pytest.raises(InvalidArgumentError, match="are not all within 0 to"):
                tree.copy(copies)
        with pytest.raises(InvalidArgumentError, match="6 copies, the engine allows 5"):
            tree.copy(*[(0, 1, 0, 1)] * 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tree_changes_no_text(engines, alone, policy: str) -> None:
    """Greedy and seeded in turn, with penalties, bias and bad words."""
    requests, expected = alone
    tokens, found = generate(engines, policy, requests, num_branches=2)
    assert tokens == expected
    is_serial = "ping_pong" not in policy and "draft_ahead" not in policy and "prune=on" not in policy
    decides_by_times = policy.startswith("price")  # of this machine's passes, and may find that none pays
    assert found["num_branch_rows"] > 0 or not is_serial or decides_by_times
    if policy.startswith("fixed:3") and "ping_pong" not in policy:
        assert 0 < found["num_branch_tokens"] < found["num_branch_rows"]
        assert found["num_steps"] < generate(engines, policy, requests)[1]["num_steps"]


def test_by_the_kernels_themselves(engines, alone) -> None:
    requests, expected = alone
    tokens, found = generate(engines, "fixed:3", requests, KernelGpu(), num_branches=2)
    assert tokens == expected
    assert found["num_branch_tokens"] > 0
    _, by_host = generate(engines, "fixed:3", requests, num_branches=2)
    assert (found["num_branch_rows"], found["num_branch_tokens"]) == (
        by_host["num_branch_rows"],
        by_host["num_branch_tokens"],
    )


def test_requests_that_wait_for_blocks_or_are_preempted_keep_their_text(engines, alone) -> None:
    requests, expected = alone
    tokens, _ = generate(engines, "fixed:4", requests, num_blocks=8, num_branches=3)
    assert tokens == expected
    options = {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}, "num_blocks": 6}
    tokens, found = generate(engines, "fixed:4", requests, num_branches=3, **options)
    assert tokens == expected
    assert found["num_preemptions"] > 0
    assert found["num_branch_tokens"] > 0


def test_fp8_caches(engines) -> None:
    requests = mixed_requests(True)
    alone = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128, kv_dtype=FP8)[0]
    tokens, found = generate(engines, "fixed:3", requests, kv_dtype=FP8, num_branches=2)
    assert tokens == alone
    assert found["num_branch_tokens"] > 0


def test_hidden_rows_that_are_copied_back_are_the_chains(engines) -> None:
    """A draft head reads these rows for a token that a branch predicted correctly."""
    limits = GpuLimits(96, 16, 6, 96, 256, 96, max_num_branches=5)
    (text,), found = random_texts(1, 30, 2), []
    with CudaFile.open(engines.target_path) as file:
        weights, hidden_size = load_weights(file, torch.device("cpu"), torch.float32), file.model["hidden_size"]
    for said in (text, [*text[:22], 7]):
        kept = HiddenRows(HostRuntime(), (0, 2), hidden_size, torch.float32, num_blocks=101, tokens_per_block=16)
        place = Placement(ExactOps(), HostRuntime(), WHOLE)
        with make_engine(weights, (0, 1, 3), place, limits, hidden_rows=kept) as engine:
            tree = Tree(engine)
            if said is text:
                tree.harness.run([(0, text, 0, 20)])
                tree.run([(0, text, 20, 25)], [(0, 22, 7)])
                tree.copy((96, int(tree.table[0, 1]), 22 - 16, 23 - 16))
            else:
                tree.harness.run([(0, said, 0, 23)])
            found.append(kept.tensor[16 * int(tree.table[0, 1]) :][:7].clone())
    assert torch.equal(*found)
    assert (found[0][6] != 0).all()


@pytest.mark.parametrize("kind", HEADS)
def test_heads_read_the_hidden_rows_of_branches_that_were_right(tmp_path: Path, kind: str) -> None:
    engines, requests = build_with_head(tmp_path, exit_layers=(2,), **HEADS[kind]), mixed_requests(True)
    alone = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)[0]
    tokens, found = generate(engines, "fixed:4", requests, num_branches=3)
    assert tokens == alone
    assert found["num_branch_rows"] > 0


def test_kept_rows_have_chains(engines) -> None:
    requests = [(prompt, replace(params, return_log_probs=True)) for prompt, params in mixed_requests(False)]
    _, found = generate(engines, "fixed:3", requests, num_branches=2)
    assert found["num_branch_rows"] == 0


def test_ranks_refuse_trees(tmp_path: Path) -> None:
    engines = build_pair(tmp_path, tp_size=2)
    with pytest.raises(ConfigError, match=r"num_branches is 2, and the target of .* is split over 2 GPUs"):
        generate(engines, "fixed:3", mixed_requests(False), num_branches=2)
