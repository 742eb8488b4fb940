"""A target split over ranks: the bits of one GPU, whatever is drafted, pruned, overlapped or cancelled, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.cuda_engine_file import CudaFile, tensor_shapes
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.shard import Shard
from faser_trtllm.config import Quantization
from faser_trtllm.core.batch import RaggedBatch, keep_rows
from faser_trtllm.engine.cuda.memory import weight_bytes
from faser_trtllm.engine.cuda.parallel.group import RankGroup
from faser_trtllm.errors import ConfigError, FaserError, InvalidArgumentError
from tests.engine.cuda.harness import HEADS, build_pair, build_with_head
from tests.engine.cuda.host_executor import generate, mixed_requests, repeating_requests
from tests.engine.cuda.ranks import (
    BesideGpu,
    BrokenGpu,
    FullGpu,
    ScarceGpu,
    SmallerGpu,
    open_target,
    rank_pids,
    wait_until_ended,
)
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL, pick
from tests.support.engine_harness import Harness

pytestmark = pytest.mark.slow

SIZES = {"num_heads": 8, "num_kv_heads": 4, "hidden_size": 64, "vocab_size": 300}
REQUESTS = mixed_requests(True)[: pick(6, 7)]
CELLS = [
    (2, "erratic"),
    *pick(
        [],
        [
            (2, "price:mode=draft_ahead,prune=on"),
            (2, "off"),
            (2, "fixed:3:ping_pong"),
            (2, "fixed:4"),
            (4, "erratic"),
            (4, "off"),
            (4, "fixed:3:draft_ahead"),
            (4, "price:prune=on"),
        ],
    ),
]


def build(directory: Path, tp_size: int) -> EngineDir:
    return build_pair(directory, exit_layers=(1,), tp_size=tp_size, **SIZES)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, EngineDir]:
    """Engines by the number of ranks."""
    return {size: build(tmp_path_factory.mktemp(f"tp{size}"), size) for size in (1, 2, 4)}


@pytest.fixture(scope="module")
def alone(built: dict[int, EngineDir]) -> list[list[int]]:
    """Tokens of one GPU, one request at a time, without speculation."""
    return generate(built[1], "off", REQUESTS, max_batch_size=1, max_num_tokens=128)[0]


@pytest.mark.parametrize(("tp_size", "policy"), CELLS)
def test_tokens_are_those_of_one_gpu(built, alone, tp_size: int, policy: str) -> None:
    tokens, found = generate(built[tp_size], policy, REQUESTS)
    assert tokens == alone
    assert (found["num_accepted_tokens"] > 0) == (policy != "off")
    assert rank_pids(os.getpid()) == [], "nothing runs after closing"


@ONLY_ALL
def test_drafts_of_the_text_change_no_token(built) -> None:
    """A target runs without a draft model: the first rank tests the drafts."""
    requests = repeating_requests()[:4]
    expected, _ = generate(built[1], "off", requests, max_batch_size=1, max_num_tokens=128)
    tokens, found = generate(built[2], "erratic", requests, drafters="suffix")
    assert tokens == expected
    assert found["num_passed_drafts_suffix"] > 0


def test_cancelled_requests_change_no_other(built, alone) -> None:
    def cancel(executor, step: int) -> None:
        if step in (2, 5):
            executor.cancel(str(step))

    tokens, _ = generate(built[2], "fixed:3:ping_pong", REQUESTS, on_step=cancel)
    assert [i for i in range(len(REQUESTS)) if tokens[i] != alone[i]] == [2, 5]
    assert all(tokens[i] == alone[i][: len(tokens[i])] for i in (2, 5))


def test_logits_and_exit_scores_have_the_same_bits(built) -> None:
    rng = np.random.default_rng(0)
    rows = [(0, rng.integers(0, 300, 40), 0, 40), (2, rng.integers(0, 300, 9), 0, 9)]
    candidates = rng.integers(-1, 300, (49, 8)).astype(np.int32)
    kept = np.array([*range(31), *range(40, 46)], np.int32)
    found = []
    for size in pick((1, 2), (1, 2, 4)):
        with ExitStack() as stack:
            harness = Harness(open_target(built[size], stack).target)
            engine, batch = harness.engine, harness.batch(rows)
            engine.forward(batch)
            whole = engine.host_logits(49).copy()
            engine.run_segment(batch, 0)
            scores = engine.early_exit(np.arange(49, dtype=np.int32), candidates)
            engine.compact_rows(kept)
            engine.run_segment(keep_rows(batch, kept, [(kept < 40).sum(), (kept >= 40).sum()]), 1)
            found.append((whole, scores, engine.host_logits(kept.size).copy()))
    for rank_found in found[1:]:
        assert all(map(np.array_equal, rank_found, found[0]))
    whole, scores, pruned = found[0]
    assert np.isfinite(scores).any()
    assert np.array_equal(pruned, whole[kept])


def test_a_call_that_is_wrong_leaves_the_ranks_in_step(built) -> None:
    rows = [(0, np.arange(30), 0, 30)]
    with ExitStack() as stack:
        harness = Harness(open_target(built[2], stack).target)
        harness.engine.forward(harness.batch(rows))
        expected = harness.engine.host_logits(30).copy()
        harness.engine.run_segment(harness.batch([(0, np.arange(9), 0, 9)]), 0)
        with pytest.raises(InvalidArgumentError, match="the batch has 30 rows, the segment before left 9"):
            harness.engine.run_segment(harness.batch(rows), 1)
        with pytest.raises(InvalidArgumentError, match="token_ids are not all within"):
            harness.engine.forward(harness.batch([(0, np.full(3, 300), 0, 3)]))
        harness.engine.forward(harness.batch(rows))
        assert np.array_equal(harness.engine.host_logits(30), expected)


@ONLY_ALL
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_for_a_split_target(tmp_path: Path, kind: str) -> None:
    found = [
        generate(build_with_head(tmp_path / str(size), exit_layers=(2,), tp_size=size, **HEADS[kind]), policy, REQUESTS)
        for size, policy in ((1, "off"), (2, "fixed:4"))
    ]
    assert found[1][0] == found[0][0]
    assert found[1][1]["num_accepted_tokens"] > 0


@ONLY_ALL
def test_fp8_matrices_are_split_with_their_scales(built) -> None:
    found = [generate(built[size], "fixed:3", REQUESTS, quantization=Quantization.FP8)[0] for size in (1, 2)]
    assert found[0] == found[1]


def run_forever(harness: Harness, batch: RaggedBatch) -> None:
    while True:
        harness.engine.forward(batch)


@pytest.mark.parametrize("calls", ["running", *pick([], ["idle"])])
def test_a_killed_rank_ends_the_others(built, monkeypatch: pytest.MonkeyPatch, calls: str) -> None:
    hooked = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failure: hooked.set())
    with ExitStack() as stack:
        harness = Harness(open_target(built[4], stack).target)
        batch, pids = harness.batch([(0, np.arange(30), 0, 30)]), rank_pids(os.getpid())
        assert len(pids) == 3
        harness.engine.forward(batch)
        os.kill(pids[1], signal.SIGKILL)
        if calls == "idle":
            wait_until_ended(pids)
            assert hooked.wait(10)
        with pytest.raises(FaserError, match=r"^rank 2 of 4 was killed by signal 9, and the others cannot go on"):
            run_forever(harness, batch)
        wait_until_ended(pids)
        assert hooked.wait(10)
        with pytest.raises(FaserError, match=r"^rank 2 of 4 was killed"):
            harness.engine.forward(batch)


@pytest.mark.parametrize("killed", ["rank", *pick([], ["leader"])])
def test_no_process_outlives_the_others(built, killed: str) -> None:
    """A server behaves the same: its engine process ends with any of its threads."""
    command = [sys.executable, "-m", "tests.engine.cuda.ranks", str(built[2].path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 1
        os.kill(leader.pid if killed == "leader" else pids[0], signal.SIGKILL)
        wait_until_ended([leader.pid, *pids])
        assert leader.wait() == (-signal.SIGKILL if killed == "leader" else 70)


@ONLY_ALL
def test_nothing_runs_after_closing(built) -> None:
    with ExitStack() as stack:
        open_target(built[2], stack)
        pids = rank_pids(os.getpid())
        assert len(pids) == 1
    wait_until_ended(pids, 0.0)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (FullGpu, r"rank 1: the engines need 0\.0. GiB of GPU memory"),
        *pick(
            [],
            [
                (BrokenGpu, "rank 1: the driver is too old"),
                (
                    SmallerGpu,
                    "rank 1 was granted the partitions whole of 132 SMs, target of 68 SMs, rank 0 whole of 132",
                ),
            ],
        ),
    ],
)
def test_a_rank_that_cannot_open_says_why(built, others, message: str) -> None:
    with ExitStack() as stack, pytest.raises(ConfigError, match=message):
        open_target(built[2], stack, BesideGpu(others))
    assert rank_pids(os.getpid()) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 renamed it
@pytest.mark.parametrize("is_renamed", [True, False])
def test_parts_are_gathered_with_the_torch_versions_that_we_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    if not is_renamed:
        monkeypatch.delattr(torch.distributed, "all_gather_single", raising=False)
    with RankGroup(Shard(0, 1), tmp_path, "gloo", torch.device("cpu")) as group:
        part, out = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
        group.gather(part, out)
        assert out.equal(part)


def test_the_least_memory_decides(built) -> None:
    with ExitStack() as stack:
        request = {"num_blocks": 100_000, "kv_memory_fraction": 0.5}
        target = open_target(built[2], stack, BesideGpu(ScarceGpu), **request).target
        assert 4 <= target.spec.num_blocks < 100_000


@pytest.mark.parametrize(
    ("backend", "tp_size", "message"),
    [
        ("cuda", 3, "tp_size is 3, but the target's num_heads is 8, of which each rank needs an equal part; take a"),
        ("cuda", 8, "tp_size is 8, but the target's num_kv_heads is 4"),
        ("cuda", 0, "tp_size is 0; it must be at least 1"),
        ("cpu", 2, "tp_size is 2, and only cuda engines are split over GPUs, not those of cpu"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, backend: str, tp_size: int, message: str) -> None:
    target, draft = make_pair(tmp_path / "checkpoints", head_dim=64, **SIZES)
    with pytest.raises(InvalidArgumentError, match=message):
        build_engines(BuildOptions(target, draft, tmp_path / "engines", backend=backend, tp_size=tp_size))


def test_a_directory_says_its_ranks(built) -> None:
    for size, engines in built.items():
        assert EngineDir.load(engines.path).tp_size == size
        mapping = {"world_size": size, "tp_size": size, "pp_size": 1}
        assert engines.target_config["pretrained_config"]["mapping"] == mapping
        assert engines.draft_config["pretrained_config"]["mapping"]["tp_size"] == 1
    assert built[1].kv_bytes_per_token() > built[2].kv_bytes_per_token() > built[4].kv_bytes_per_token()


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_each_row_is_one_ranks_and_whole_tensors_are_all_ranks(size, group, num_kv_heads, num_inner, has_bias) -> None:
    heads = num_kv_heads * size
    model = {
        "hidden_size": 8 * size,
        "head_dim": 16,
        "vocab_size": 12 * size,
        "intermediate_size": 8 * num_inner * size,
    }
    model |= {"num_heads": heads * group, "num_kv_heads": heads, "num_layers": 1, "tied": False, "qk_norm": True}
    model |= {"qkv_bias": has_bias, "o_bias": has_bias, "mlp_bias": has_bias}
    shards = [Shard(rank, size) for rank in range(size)]
    for name, shape in tensor_shapes(model).items():
        parts = [[row for own in shard.rows(name, shape[0], model) for row in range(shape[0])[own]] for shard in shards]
        own = tensor_shapes(shards[0].sizes(model))[name][0]
        if name.rpartition(".")[2].removesuffix("_bias") in ("o", "down", "lm_head"):
            own = shape[0] // size  # outputs are hidden rows and the vocabulary, which are whole on all ranks
        assert {len(part) for part in parts} == {own}, name
        if own < shape[0]:
            assert sorted(row for part in parts for row in part) == list(range(shape[0]))
        else:
            assert all(part == list(range(shape[0])) for part in parts)


def test_weights_are_counted_by_rank(built) -> None:
    path = built[1].target_path
    whole, *parts = (
        [weight_bytes(path, Quantization.NONE, Shard(rank, size)) for rank in range(size)] for size in (1, 2, 4)
    )
    with CudaFile.open(path) as file:
        sizes = file.model
        shared = 2 * (sizes["vocab_size"] + 1) * sizes["hidden_size"] + 4 * sizes["head_dim"] // 2
    for part in parts:
        assert len(set(part)) == 1
        split = part[0] - shared
        assert split * len(part) == whole[0] - shared
