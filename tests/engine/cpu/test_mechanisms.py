"""Bit for bit under the mechanisms together: segments, early exit between them, pruned rows, changed partitions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.batch import keep_rows
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.experts import SOFTMAX, ExpertsConfig
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.conftest import MAX_BATCH_SIZE
from tests.support.core_sets import OversubscribedCoreSet
from tests.support.effort import examples, pick
from tests.support.engine_harness import Harness
from tests.support.tiny_model import TinyConfig, TinyModel

LENGTHS = (90, 41, 30)
CONFIGS = {
    "plain": TinyConfig(num_layers=4, hidden_size=192, intermediate_size=768, max_seq_len=128),
    "window": TinyConfig(num_layers=4, max_seq_len=128, windows=(19,), qk_norm=True, biases=True),
    "sinks": TinyConfig(num_layers=4, max_seq_len=128, windows=(19, 0), sinks=True, biases=True),
}


CONFIGS |= {
    "int8": replace(CONFIGS["window"], quantization="int8"),
    "W8A8": replace(CONFIGS["window"], quantization="W8A8"),
    "experts": replace(CONFIGS["window"], experts=ExpertsConfig(9, 3, 160, SOFTMAX, True)),
    "experts-W8A8": replace(CONFIGS["plain"], experts=ExpertsConfig(9, 3, 768, SOFTMAX, True), quantization="W8A8"),
    "int4": replace(CONFIGS["plain"], quantization="int4", quantize_lm_head=True),
}


@pytest.fixture(scope="module", params=pick(["plain", "window", "sinks", "int4", "experts"], list(CONFIGS)))
def rig(request, tmp_path_factory):
    """Tokens of some requests, logits and early-exit scores computed one row at a time, an engine, partitions."""
    config = CONFIGS[request.param]
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, config.vocab_size, length).tolist() for length in LENGTHS]
    candidates = [rng.integers(0, config.vocab_size, (length, 8)).astype(np.int32) for length in LENGTHS]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("FASER_CPU_TEAM", "always")
        core_sets = [CoreSet(num_threads=1), CoreSet(), CoreSet([CoreSet().cores[-1]]), OversubscribedCoreSet(5)]
        for core_set in core_sets:
            stack.callback(core_set.close)
        path = TinyModel(config).write(tmp_path_factory.mktemp("engines") / "rank0.engine", [0, 1, 2, 4])
        engine = stack.enter_context(
            CpuEngine.open(
                path,
                core_sets[0],
                num_blocks=MAX_BATCH_SIZE * 4,
                tokens_per_block=32,
                max_batch_size=MAX_BATCH_SIZE,
                max_num_tokens=256,
            )
        )
        harness = Harness(engine)
        logits, scores = [], []
        for i, sequence in enumerate(tokens):
            logits.append([])
            scores.append([])
            for position in range(len(sequence)):
                batch = harness.batch([(i, sequence, position, position + 1)])
                row = np.zeros(1, np.int32)
                engine.run_segment(batch, 0)
                first = engine.early_exit(row, candidates[i][position : position + 1])[0]
                engine.run_segment(batch, 1)
                second = engine.early_exit(row, candidates[i][position : position + 1])[0]
                logits[i].append(engine.run_segment(batch, 2)[0, : config.vocab_size].copy())
                scores[i].append((first, second))
        yield harness, core_sets, tokens, candidates, logits, scores


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_course_of_a_pass_gives_the_same_bits(rig, data) -> None:
    """Requests keep a prefix of their rows at each boundary; whatever else happens between two segments."""
    harness, core_sets, tokens, candidates, logits, scores = rig
    engine = harness.engine
    vocab_size = engine.spec.vocab_size
    starts = [data.draw(st.integers(0, length - 1), label="start") for length in LENGTHS]
    ends = [
        data.draw(st.integers(start + 1, min(length, start + 24)), label="end")
        for start, length in zip(starts, LENGTHS, strict=True)
    ]
    engine.use(core_sets[data.draw(st.integers(0, len(core_sets) - 1))])
    harness.run([(i, tokens[i], 0, start) for i, start in enumerate(starts) if start])
    batch = harness.batch([(i, tokens[i], starts[i], ends[i]) for i in range(3)])
    for segment in range(3):
        engine.use(core_sets[data.draw(st.integers(0, len(core_sets) - 1), label="partition")])
        found = engine.run_segment(batch, segment)
        if segment == 2:
            break
        counts = np.diff(batch.cu_rows)
        where = [(i, starts[i] + j) for i in range(3) for j in range(counts[i])]
        if data.draw(st.booleans(), label="early exit"):
            engine.use(core_sets[data.draw(st.integers(0, len(core_sets) - 1), label="partition")])
            rows = data.draw(st.permutations(range(batch.num_rows)), label="rows")[: data.draw(st.integers(0, 40))]
            asked = np.array([candidates[where[row][0]][where[row][1]] for row in rows], np.int32).reshape(-1, 8)
            hidden = engine.hidden_rows(batch.num_rows)
            seen = engine.early_exit(np.array(rows, np.int32), asked)
            np.testing.assert_array_equal(engine.hidden_rows(batch.num_rows), hidden)
            for row, values in zip(rows, seen, strict=True):
                request, position = where[row]
                np.testing.assert_array_equal(values, scores[request][position][segment])
        if data.draw(st.booleans(), label="prune"):
            kept = [data.draw(st.integers(1, int(n)), label="kept") for n in counts]
            first = batch.cu_rows[:-1]
            rows = np.concatenate([np.arange(f, f + n) for f, n in zip(first, kept, strict=True)]).astype(np.int32)
            engine.compact_rows(rows)
            batch = keep_rows(batch, rows, kept)
    for i in range(3):
        for j in range(batch.cu_rows[i + 1] - batch.cu_rows[i]):
            np.testing.assert_array_equal(found[batch.cu_rows[i] + j, :vocab_size], logits[i][starts[i] + j])


def test_drafting_on_any_partition(rig) -> None:
    """The same drafts, margins and candidates, with the partition changed between two calls."""
    harness, core_sets, tokens, *_ = rig
    engine = harness.engine
    drafted = []
    for course in ([0, 0], [1, 2], [3, 1], [2, 3]):
        keys = iter(range(1, 9))
        table = SamplingTable(MAX_BATCH_SIZE, engine.spec.vocab_size, 6, new_key=lambda keys=keys: next(keys))
        requests = []
        for slot, params in enumerate(({}, {"temperature": 1.0}, {"temperature": 0.8, "seed": 5})):
            params = SamplingParams(max_tokens=20, **params)
            sizes = {"max_seq_len": 128, "max_draft_len": 6, "keep_candidates": True}
            requests.append(Request(str(slot), tokens[slot][:20], params, **sizes))
            table.bind(slot, requests[-1])
        for call, partition in enumerate(course):
            engine.use(core_sets[partition])
            batch = harness.batch([(r, requests[r].tokens, 0, 20 + 3 * call) for r in range(3)])
            counts = [np.full(3, value, np.int32) for value in (20, 3 * call, 3)]
            assert engine.draft(DraftBatch(batch, table.array, *counts, max_draft_len=6)).tolist() == [3, 3, 3]
        drafted.append([(r.tokens.tolist(), r.draft_margins.tolist(), r.draft_candidates.tolist()) for r in requests])
    assert all(one == drafted[0] for one in drafted[1:])


def test_a_partition_may_be_closed_once_it_is_left(tmp_path) -> None:
    path = TinyModel(TinyConfig(num_layers=2)).write(tmp_path / "rank0.engine", [0, 1, 2])
    sizes = {"num_blocks": 40, "tokens_per_block": 32, "max_batch_size": 2, "max_num_tokens": 32}
    with CoreSet(num_threads=1) as first, CpuEngine.open(path, first, **sizes) as engine:
        harness = Harness(engine)
        wanted = harness.run([(0, list(range(20)), 0, 20)])[0]
        for _ in range(20):  # more than the engine remembers
            with CoreSet() as other:
                engine.use(other)
                np.testing.assert_array_equal(harness.run([(0, list(range(20)), 0, 20)])[0], wanted)
                engine.use(first)
        np.testing.assert_array_equal(harness.run([(0, list(range(20)), 0, 20)])[0], wanted)
        closed = CoreSet(num_threads=1)
        closed.close()
        with pytest.raises(ValueError, match="closed"):
            engine.use(closed)
        np.testing.assert_array_equal(harness.run([(0, list(range(20)), 0, 20)])[0], wanted)
    with pytest.raises(ValueError, match="closed"):
        engine.early_exit(np.zeros(1, np.int32), np.zeros((1, 8), np.int32))


def test_scores_only_between_segments(rig) -> None:
    harness, core_sets, tokens, candidates, *_ = rig
    harness.engine.use(core_sets[0])
    harness.run([(0, tokens[0], 0, 5)])
    with pytest.raises(InvalidArgumentError):
        harness.engine.early_exit(np.zeros(1, np.int32), candidates[0][:1])


def test_two_lanes_at_once(rig, tmp_path) -> None:
    """A verify lane and a draft lane, in threads and on partitions of their own, disturb nothing."""
    harness, core_sets, tokens, candidates, logits, scores = rig
    drafts = TinyModel(TinyConfig(num_layers=2, max_seq_len=128)).write(tmp_path / "rank0.engine")
    sizes = {"num_blocks": MAX_BATCH_SIZE * 4, "tokens_per_block": 32, "max_num_tokens": 256}
    with CpuEngine.open(drafts, core_sets[2], max_batch_size=MAX_BATCH_SIZE, **sizes) as draft_engine:
        draft_harness = Harness(draft_engine)
        harness.engine.use(core_sets[0])

        def draft() -> list[int]:
            table = SamplingTable(MAX_BATCH_SIZE, draft_engine.spec.vocab_size, 6)
            request = Request("r", tokens[0][:20], SamplingParams(max_tokens=20), max_seq_len=128, max_draft_len=6)
            table.bind(0, request)
            counts = [np.array([value], np.int32) for value in (20, 0, 6)]
            batch = draft_harness.batch([(0, request.tokens, 0, 20)])
            draft_engine.draft(DraftBatch(batch, table.array, *counts, max_draft_len=6))
            return [*request.tokens[20:26].tolist(), *request.draft_margins[20:26].tolist()]

        def verify() -> None:
            batch = harness.batch([(i, tokens[i], 0, 20) for i in range(3)])
            harness.engine.run_segment(batch, 0)
            asked = np.concatenate([candidates[i][:20] for i in range(3)])
            seen = harness.engine.early_exit(np.arange(60, dtype=np.int32), asked)
            np.testing.assert_array_equal(seen, np.array([scores[i][j][0] for i in range(3) for j in range(20)]))
            harness.engine.run_segment(batch, 1)
            found = harness.engine.run_segment(batch, 2)[:, : harness.engine.spec.vocab_size]
            np.testing.assert_array_equal(found, np.concatenate([logits[i][:20] for i in range(3)]))

        wanted = draft()
        with ThreadPoolExecutor(2) as lanes:
            for _ in range(20):
                drafted, verified = lanes.submit(draft), lanes.submit(verify)
                verified.result()
                assert drafted.result() == wanted
