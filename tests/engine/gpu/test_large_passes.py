"""Passes beyond those whose graph makes all logits: padded, run at start-up, and the bits of passes as they are."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.batch import RaggedBatch, keep_rows
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.buckets import Buckets
from faser_trtllm.engine.cuda import decoder
from faser_trtllm.ops.cuda.verify_attention import MAX_WHOLE_TOKENS
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import WHOLE, build_pair, open_engine, random_tokens
from tests.engine.cuda.host_executor import HostGpu, generate
from tests.support.engine_harness import Harness

SMALL = {"max_graph_rows": 16}
"""Passes of more than 16 rows are large; all 96 may have logits."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1, 2))


def run_passes(engine) -> list[np.ndarray]:
    """Logits of passes of many row counts that build on each other's KV, and of one with rows dropped in between."""
    first, second, third = random_tokens(250), random_tokens(90, 1), random_tokens(60, 2)
    passes = [
        [(2, first, 0, 37), (0, second, 0, 1)],
        [(0, second, 1, 50)],
        [(2, first, 37, 94), (0, second, 50, 60), (3, third, 0, 3)],
        [(2, first, 94, 190)],
        [(0, second, 60, 61), (2, first, 190, 191), (3, third, 3, 4)],
    ]
    harness = Harness(engine)
    found = [logits.copy() for rows in passes for logits in harness.run(rows)]
    rows, kept = [(2, first, 191, 240), (3, third, 4, 6)], np.array([*range(31), 49, 50], np.int32)
    batch = harness.batch(rows)
    engine.run_segment(batch, 0)
    engine.compact_rows(kept)
    batch = keep_rows(batch, kept, [31, 2])
    found.append([engine.run_segment(batch, segment) for segment in (1, 2)][1][:].copy())
    return [*found, *(logits.copy() for logits in harness.run([(2, first, 222, 223), (3, third, 6, 7)]))]


@pytest.fixture(params=[MAX_WHOLE_TOKENS, 64])
def whole_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Contexts beyond it are split, so that large passes have bounds for shorter and for longer ones."""
    monkeypatch.setattr(decoder, "MAX_WHOLE_TOKENS", request.param)
    return request.param


@pytest.mark.parametrize("is_captured", [True, False])
def test_padding_changes_no_bit(
    pair: EngineDir, monkeypatch: pytest.MonkeyPatch, is_captured: bool, whole_tokens: int
) -> None:
    with open_engine(pair.target_path, **SMALL) as engine:
        if is_captured:
            engine.capture_graphs([WHOLE])
        padded = run_passes(engine)
    monkeypatch.setattr(Buckets, "rows", lambda self, num_rows: num_rows)
    with open_engine(pair.target_path, **SMALL) as engine:
        as_they_are = run_passes(engine)
    for found, expected in zip(padded, as_they_are, strict=True):
        np.testing.assert_array_equal(found, expected)


class CountedOps(ExactOps):
    """Remembers how many rows its products have had, and attention its bounds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[Any]] = {"layers": set(), "logits": set(), "attention": set()}

    def linear(self, x, weight, scaled=None):
        self.seen["layers"].add(x.shape[0])
        return super().linear(x, weight, scaled)

    def logits(self, x, lm_head, out):
        self.seen["logits"].add(x.shape[0])
        super().logits(x, lm_head, out)

    def verify_attention(self, q, *inputs, **bounds):
        self.seen["attention"].add((q.shape[0], bounds["max_query_rows"], bounds["max_kv_len"]))
        super().verify_attention(q, *inputs, **bounds)


def with_logit_rows(batch: RaggedBatch, rows: np.ndarray) -> RaggedBatch:
    return RaggedBatch(batch.slots, batch.cu_rows, batch.token_ids, batch.positions, rows, batch.block_table)


@pytest.mark.parametrize("graph_bytes", [0, 1 << 30])
def test_all_sizes_of_layers_and_of_logits_are_run_at_start_up(
    pair: EngineDir, graph_bytes: int, whole_tokens: int
) -> None:
    """Also where more rows may have logits than a small pass has, and where no graph has memory."""
    ops = CountedOps()
    with open_engine(pair.target_path, ops, max_logit_rows=70, graph_bytes=graph_bytes, **SMALL) as engine:
        num_left_out = engine.capture_graphs([WHOLE])
        at_start = {name: seen.copy() for name, seen in ops.seen.items()}
        harness, tokens = Harness(engine), random_tokens(200)
        for count in range(1, 97):
            for begin in (0, 104):
                batch = harness.batch([(0, tokens, begin, begin + count)])
                engine.forward(with_logit_rows(batch, batch.logit_rows[-70:]))
    assert ops.seen == at_start
    assert max(at_start["logits"]) == 70
    kv_lens = {kv_len for rows, _, kv_len in at_start["attention"] if rows > 16}
    assert kv_lens == ({256, whole_tokens} if whole_tokens < 256 else {256})
    assert (num_left_out == 0) == (graph_bytes > 0)


class FullRuntime(HostRuntime):
    def free_bytes(self) -> int:
        return 0


class FullGpu(HostGpu):
    def make_runtime(self) -> FullRuntime:
        return FullRuntime()


def messages_of(gpu: HostGpu, pair: EngineDir, caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    """Return what the log says of graphs when a pair is opened, by level."""
    caplog.set_level(logging.INFO)
    requests = [([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))]
    generate(pair, "fixed:2", requests, gpu=gpu, max_batch_size=2, max_num_tokens=24)
    said: dict[str, list[str]] = {"INFO": [], "WARNING": []}
    for record in caplog.records:
        if "CUDA graphs" in record.getMessage():
            said[record.levelname].append(record.getMessage())
    return said


def test_the_log_says_which_passes_have_no_graph(pair: EngineDir, caplog: pytest.LogCaptureFixture) -> None:
    said = messages_of(FullGpu(), pair, caplog)
    assert [message.split(" captured")[0] for message in said["INFO"]] == [
        "target: 0 CUDA graphs",
        "draft: 0 CUDA graphs",
    ]
    target, draft = said["WARNING"]
    assert target.startswith("target: no memory was left for ")
    assert draft.startswith("draft: no memory was left for ")
    assert target.endswith("passes of 1, 2, 4, 8, 10, 16, 24 rows run without one, kernel by kernel")


def test_the_log_does_not_warn_where_all_have_graphs(pair: EngineDir, caplog: pytest.LogCaptureFixture) -> None:
    said = messages_of(HostGpu(), pair, caplog)
    assert [message.split(":")[0] for message in said["INFO"]] == ["target", "draft"]
    assert not said["WARNING"]
