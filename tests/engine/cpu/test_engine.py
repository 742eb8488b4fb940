"""CpuEngine at its edges: wrong input, wrong files, order of segments, drafting, closing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import ConfigError, EngineFileError, FaserError, InvalidArgumentError
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.conftest import MAX_BATCH_SIZE, OpenHarness
from tests.support.tiny_model import TinyConfig, TinyModel

SIZES = {"num_blocks": 8, "tokens_per_block": 16, "max_batch_size": 2, "max_num_tokens": 32}


@pytest.mark.parametrize(
    ("field", "index", "value", "sentence"),
    [
        ("token_ids", 3, 100, "token id"),
        ("token_ids", 0, -1, "token id"),
        ("positions", 0, -1, "position"),
        ("positions", 4, 640, "position"),
        ("positions", 2, 7, "position"),
        ("slots", 0, MAX_BATCH_SIZE, "argument"),
        ("slots", 0, -1, "argument"),
        ("cu_rows", 1, 6, "argument"),
        ("cu_rows", 0, 1, "argument"),
        ("logit_rows", 1, 0, "argument"),
        ("logit_rows", 4, 5, "argument"),
        ("block_table", 0, 1000, "block id"),
        ("block_table", 0, -1, "block id"),
    ],
)
def test_bad_input_is_refused(field: str, index: int, value: int, sentence: str, open_harness: OpenHarness) -> None:
    harness = open_harness(TinyModel(TinyConfig()))
    batch = harness.batch([(0, list(range(9)), 0, 5)])
    wanted = harness.engine.forward(batch).copy()
    array = getattr(batch, field).reshape(-1)
    kept, array[index] = array[index], value
    with pytest.raises(InvalidArgumentError, match=sentence):
        harness.engine.forward(batch)
    array[index] = kept
    np.testing.assert_array_equal(harness.engine.forward(batch), wanted)


def test_a_pass_has_its_limits(open_harness: OpenHarness) -> None:
    harness = open_harness(TinyModel(TinyConfig()))
    batch = harness.batch([(0, list(range(9)), 0, 5)])
    mismatched = type(batch)(
        batch.slots, batch.cu_rows, batch.token_ids, batch.positions[:3], batch.logit_rows, batch.block_table
    )
    with pytest.raises(ValueError, match="as many positions, not 3"):
        harness.engine.forward(mismatched)
    narrow = type(batch)(
        batch.slots, batch.cu_rows, batch.token_ids, batch.positions, batch.logit_rows, batch.block_table[:2]
    )
    with pytest.raises(ValueError, match="block_table has 2 rows"):
        harness.engine.forward(narrow)


def test_segments_run_in_order(open_harness: OpenHarness) -> None:
    harness = open_harness(TinyModel(TinyConfig()), segments=[0, 1, 2, 3])
    engine: Engine = harness.engine
    batch = harness.batch([(0, list(range(9)), 0, 5)])
    with pytest.raises(InvalidArgumentError, match="5 rows"):
        engine.run_segment(batch, 1)
    engine.run_segment(batch, 0)
    with pytest.raises(InvalidArgumentError):
        engine.run_segment(batch, 2)
    with pytest.raises(InvalidArgumentError, match=r"keeping rows \[1, 1\]"):
        engine.compact_rows(np.array([1, 1], np.int32))
    with pytest.raises(InvalidArgumentError):
        engine.compact_rows(np.array([5], np.int32))
    with pytest.raises(InvalidArgumentError, match="segment is 3, allowed is 0 to 2"):
        engine.run_segment(batch, 3)


def test_drafting_follows_the_greedy_path(open_harness: OpenHarness) -> None:
    """faser_draft appends what single passes with argmax would."""
    model = TinyModel(TinyConfig())
    harness = open_harness(model)
    table = SamplingTable(MAX_BATCH_SIZE, model.config.vocab_size, 4)
    requests = []
    for slot, length in ((2, 11), (0, 5)):
        prompt = np.random.default_rng(slot).integers(0, 100, length)
        request = Request(str(slot), prompt, SamplingParams(max_tokens=20), max_seq_len=200, max_draft_len=4)
        table.bind(slot, request)
        requests.append((slot, request))
    batch = harness.batch([(slot, request.tokens, 0, request.num_tokens) for slot, request in requests])
    lengths = np.array([11, 5], np.int32)
    zeros, wanted = np.zeros(2, np.int32), np.array([4, 2], np.int32)
    num_new = harness.engine.draft(DraftBatch(batch, table.array, lengths, zeros, wanted, max_draft_len=4))
    assert num_new.tolist() == [4, 2]
    for (slot, request), num_drafted in zip(requests, (4, 2), strict=True):
        expected = request.tokens[: request.num_tokens].tolist()
        for _ in range(num_drafted):
            expected.append(int(harness.run([(slot, expected, 0, len(expected))])[0][-1].argmax()))
        assert request.tokens[: len(expected)].tolist() == expected


def test_opening_refuses_what_cannot_be(tmp_path: Path) -> None:
    path = TinyModel(TinyConfig()).write(tmp_path / "rank0.engine")
    with CoreSet(num_threads=1) as core_set:
        for field, value in {"num_blocks": 0, "tokens_per_block": 24, "max_num_tokens": 0}.items():
            with pytest.raises(ConfigError, match=f"{field} is {value}"):
                CpuEngine.open(path, core_set, **SIZES | {field: value})
        with pytest.raises(ConfigError, match="max_seq_len is 641, the engine allows 1 to 640"):
            CpuEngine.open(path, core_set, **SIZES, max_seq_len=641)
        with pytest.raises(FaserError, match="lower kv_cache_config"):
            CpuEngine.open(path, core_set, **SIZES | {"num_blocks": 2**31 - 1, "tokens_per_block": 2**20})
        with pytest.raises(FaserError, match=r"for 1073741830 KV blocks .* lower num_branches, kv_cache_config"):
            CpuEngine.open(
                path, core_set, **SIZES | {"num_blocks": 2**30, "tokens_per_block": 2**20}, max_num_branches=6
            )
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(EngineFileError, match="truncated"):
            CpuEngine.open(path, core_set, **SIZES)


def test_unrunnable_head_dim_is_refused(tmp_path: Path) -> None:
    path = TinyModel(TinyConfig(head_dim=258)).write(tmp_path / "rank0.engine")
    with (
        CoreSet(num_threads=1) as core_set,
        pytest.raises(EngineFileError, match=r"head_dim \(258\) is even and at most 256"),
    ):
        CpuEngine.open(path, core_set, **SIZES)


def test_limits_and_closing(tmp_path: Path) -> None:
    path = TinyModel(TinyConfig()).write(tmp_path / "rank0.engine", [0, 2, 3])
    with CoreSet(num_threads=1) as core_set:
        engine = CpuEngine.open(path, core_set, **SIZES, max_seq_len=50)
        assert engine.spec.max_seq_len == 50
        assert engine.spec.segments == (0, 2, 3)
        kv_bytes = 2 * 3 * 8 * 16 * 2 * 32 * 2
        assert kv_bytes < engine.memory_bytes < kv_bytes + (1 << 20)
        engine.close()
        engine.close()
        with pytest.raises(ValueError, match="closed"):
            engine.forward(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="closed"):
            engine.compact_rows(np.arange(1, dtype=np.int32))
        with pytest.raises(ValueError, match="closed"):
            assert engine.memory_bytes
