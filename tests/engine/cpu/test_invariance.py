"""Bit for bit: a row's logits do not depend on the batch, chunks, threads, segments or block size."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.models.experts import CLAMPED, SOFTMAX, TOP_K_SOFTMAX, ExpertsConfig
from faser_trtllm.partition.core_set import CoreSet
from tests.engine.conftest import MAX_BATCH_SIZE, OpenHarness
from tests.support.core_sets import OversubscribedCoreSet
from tests.support.effort import examples, pick
from tests.support.engine_harness import Harness
from tests.support.tiny_model import TinyConfig, TinyModel

NUM_REQUESTS = 3
LENGTHS = (300, 75, 34)
CONFIGS = {
    # Large enough that even one row is shared by two threads.
    "plain": TinyConfig(num_layers=2, hidden_size=192, intermediate_size=768, max_seq_len=320),
    "window": TinyConfig(
        num_layers=2, max_seq_len=320, windows=(43,), head_dim=20, num_heads=6, biases=True, qk_norm=True
    ),
    "sinks": TinyConfig(num_layers=2, max_seq_len=320, windows=(43, 0), head_dim=64, sinks=True, biases=True),
}


CONFIGS |= {
    "int8": replace(CONFIGS["plain"], quantization="int8", quantize_lm_head=True),
    "int4": replace(CONFIGS["window"], quantization="int4", num_heads=8, intermediate_size=320),
    "int8-window": replace(CONFIGS["window"], quantization="int8"),
    "int4-plain": replace(CONFIGS["plain"], quantization="int4"),
    "W8A8": replace(CONFIGS["plain"], quantization="W8A8", quantize_lm_head=True),
    "W4A8": replace(CONFIGS["window"], quantization="W4A8", num_heads=8, intermediate_size=320),
    "W8A8-window": replace(CONFIGS["window"], quantization="W8A8"),
    "W4A8-128": replace(CONFIGS["plain"], quantization="W4A8:128", hidden_size=256, quantize_lm_head=True),
    "gpt_oss": replace(
        CONFIGS["sinks"], experts=ExpertsConfig(8, 3, 160, TOP_K_SOFTMAX, False, CLAMPED, True), num_heads=8
    ),
    "olmoe": replace(
        CONFIGS["plain"],
        head_dim=24,
        num_kv_heads=4,
        qk_norm=True,
        norms_all_heads=True,
        experts=ExpertsConfig(9, 3, 768, SOFTMAX, False),
    ),
    "experts": replace(CONFIGS["window"], experts=ExpertsConfig(9, 3, 160, SOFTMAX, True, shared_size=70)),
    "gpt_oss-mxfp4": replace(
        CONFIGS["sinks"], experts=ExpertsConfig(8, 3, 160, TOP_K_SOFTMAX, False, CLAMPED, True), quantization="mxfp4"
    ),
    "experts-W4A8": replace(CONFIGS["plain"], experts=ExpertsConfig(20, 8, 768, SOFTMAX, True), quantization="W4A8"),
    "experts-int4": replace(CONFIGS["plain"], experts=ExpertsConfig(20, 8, 768, SOFTMAX, True), quantization="int4"),
    "int4-128": replace(CONFIGS["plain"], quantization="int4:128", hidden_size=256, quantize_lm_head=True),
}


@pytest.fixture(
    scope="module",
    params=pick(["plain", "window", "int8", "int4", "W8A8", "W4A8", "experts", "gpt_oss"], list(CONFIGS)),
)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Tokens of some requests, their logits computed one row at a time, and engines of many kinds."""
    model = TinyModel(CONFIGS[request.param])
    folder: Path = tmp_path_factory.mktemp("engines")
    rng = np.random.default_rng(7)
    tokens = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("FASER_CPU_TEAM", "always")
        core_sets = [CoreSet(num_threads=1), CoreSet(), OversubscribedCoreSet(5)]
        harnesses = []
        for index, (core_set, tokens_per_block) in enumerate(
            [(core_sets[0], 16), (core_sets[1], 32), (core_sets[1], 320), (core_sets[2], 48)]
        ):
            stack.callback(core_set.close)
            path = model.write(folder / f"{index}.engine", [0, 1, 2])
            engine = CpuEngine.open(
                path,
                core_set,
                num_blocks=MAX_BATCH_SIZE * -(-320 // tokens_per_block),
                tokens_per_block=tokens_per_block,
                max_batch_size=MAX_BATCH_SIZE,
                max_num_tokens=512,
            )
            harnesses.append(Harness(stack.enter_context(engine), seed=index))
        wanted = [
            np.concatenate([harnesses[0].run([(0, sequence, i, i + 1)])[0] for i in range(len(sequence))])
            for sequence in tokens
        ]
        yield tokens, wanted, harnesses


def _run_segments(harness: Harness, rows: list) -> list[np.ndarray]:
    batch = harness.batch(rows)
    assert harness.engine.run_segment(batch, 0) is None
    logits = harness.engine.run_segment(batch, 1)
    assert logits is not None
    ends = np.cumsum([end - first for _, _, first, end in rows])
    return np.split(logits[:, : harness.engine.spec.vocab_size].copy(), ends[:-1])


@settings(max_examples=examples(12))
@given(data=st.data())
def test_any_schedule_gives_the_same_bits(rig, data: st.DataObject) -> None:
    tokens, wanted, harnesses = rig
    harness = harnesses[data.draw(st.integers(0, len(harnesses) - 1), label="engine")]
    slots = data.draw(st.permutations(range(MAX_BATCH_SIZE)), label="slots")
    done = [0] * NUM_REQUESTS
    while any(done[i] < len(tokens[i]) for i in range(NUM_REQUESTS)):
        rows, owners = [], []
        for i in data.draw(st.permutations(range(NUM_REQUESTS)), label="order"):
            left = len(tokens[i]) - done[i]
            if not left:
                continue
            limit = data.draw(st.sampled_from([1, 2, 5, 9, 40, 170]), label="limit")
            count = data.draw(st.integers(0, min(left, limit)), label="rows")
            if count or not any(done):
                count = max(count, 1)
                rows.append((slots[i], tokens[i], done[i], done[i] + count))
                owners.append(i)
        if not rows:
            i = min(range(NUM_REQUESTS), key=lambda i: done[i] - len(tokens[i]))
            rows, owners = [(slots[i], tokens[i], done[i], len(tokens[i]))], [i]
        split = data.draw(st.booleans(), label="segments")
        logits = _run_segments(harness, rows) if split else harness.run(rows)
        for i, (_, _, first, end), found in zip(owners, rows, logits, strict=True):
            np.testing.assert_array_equal(found, wanted[i][first:end])
            done[i] = end


def test_dropped_rows_leave_the_others_alone(rig) -> None:
    """Rows pruned between two segments; their keys are missing in later layers only for themselves."""
    tokens, wanted, harnesses = rig
    for harness in harnesses:
        harness.run([(i, tokens[i], 0, 20) for i in range(NUM_REQUESTS)])
        whole = [(i, tokens[i], 20, 20 + count) for i, count in enumerate((5, 4, 1))]
        harness.engine.run_segment(harness.batch(whole), 0)
        harness.engine.compact_rows(np.array([0, 1, 2, 5, 9], np.int32))
        kept = [(i, tokens[i], 20, 20 + count) for i, count in enumerate((3, 1, 1))]
        logits = harness.engine.run_segment(harness.batch(kept), 1)
        assert logits is not None
        found = logits[:, : harness.engine.spec.vocab_size]
        expected = np.concatenate([wanted[i][20:end] for i, _, _, end in kept])
        np.testing.assert_array_equal(found, expected)


def test_empty_request_and_empty_batch(rig) -> None:
    tokens, wanted, harnesses = rig
    harness = harnesses[1]
    found = harness.run([(0, tokens[0], 0, 0), (1, tokens[1], 0, 3), (2, tokens[2], 0, 0)])
    np.testing.assert_array_equal(found[1], wanted[1][:3])
    assert harness.engine.forward(harness.batch([])).shape[0] == 0


def test_shared_blocks_serve_two_requests(open_harness: OpenHarness) -> None:
    """Two slots whose tables begin with the same blocks read the same prefix."""
    model = TinyModel(TinyConfig())
    harness = open_harness(model, tokens_per_block=16)
    tokens = np.random.default_rng(8).integers(0, model.config.vocab_size, 50).tolist()
    alone = harness.run([(0, tokens, 0, 50)])[0]
    harness.block_table[1, :2] = harness.block_table[0, :2]
    shared = harness.run([(1, tokens, 32, 50)])[0]
    np.testing.assert_array_equal(shared, alone[32:])


@pytest.mark.parametrize("name", pick(["plain"], ["plain", "window", "int4"]))
def test_a_long_prompt_in_chunks(open_harness: OpenHarness, name: str) -> None:
    """Over many chunks of attention, in one pass and in several, and a row behind them."""
    length = 1500
    model = TinyModel(replace(CONFIGS[name], max_seq_len=1536))
    harness = open_harness(model, max_num_tokens=length + 1)
    tokens = np.random.default_rng(9).integers(0, model.config.vocab_size, length + 1).tolist()
    whole = harness.run([(0, tokens, 0, length + 1)])[0]
    ends = [0, 512, 1024, 1031, length, length + 1]
    parts = [harness.run([(1, tokens, first, end)])[0] for first, end in pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
