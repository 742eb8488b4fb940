"""The interpreted engine under the real executor: TensorRT networks serve requests, with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.builder.network.fp8 import CheckpointLayers
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.batch import BatchBuilder, RaggedBatch
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.opening import stay
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.calibration import calibrate_input_scales
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.policy.static import FixedPolicy, OffPolicy
from faser_trtllm.sampling.table import SamplingTable
from lab.clock import ManualClock
from lab.interpreted.engine import InterpretedEngine
from lab.reference import draft_loop
from lab.reference.early_exit import early_exit_reference
from tests.support.checkpoints import make_pair
from tests.support.effort import pick
from tests.support.executor_harness import Collector, ErraticPolicy
from tests.support.networks import load_trt, options

trt = load_trt()
MAX_BATCH_SIZE, MAX_SEQ_LEN, MAX_DRAFT_LEN, NUM_TOKENS = 3, 48, 4, 8
PROMPTS = [np.random.default_rng(seed).integers(2, 320, 3 + 2 * seed).tolist() for seed in range(10)]
POLICIES = {
    "off": lambda: OffPolicy(),
    "fixed": lambda: FixedPolicy(3),
    "erratic": lambda: ErraticPolicy(MAX_DRAFT_LEN, seed=0),  # all modes, trims and prunes at random
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), num_layers=3, draft_layers=2)


def open_interpreted(
    directory: Path, exit_layers: tuple[int, ...] = (), input_scales: dict[str, float] | None = None, **changes: Any
) -> InterpretedEngine:
    """input_scales: of an engine in fp8."""
    sizes = {"max_batch_size": MAX_BATCH_SIZE, "max_seq_len": MAX_SEQ_LEN, "tokens_per_block": MAX_SEQ_LEN}
    config = load_model_config(directory)
    with CheckpointWeights(directory) as weights:
        fp8 = None if input_scales is None else CheckpointLayers(weights, input_scales)
        return Float32Logits(trt, config, weights, options(**(sizes | changes)), exit_layers, fp8)


class Float32Logits(InterpretedEngine):
    """Whatever the sums were in (the fixture exact_sums), samplers take float32."""

    def run_segment(self, batch: RaggedBatch, segment: int) -> np.ndarray | None:
        logits = super().run_segment(batch, segment)
        return None if logits is None else logits.astype(np.float32)


@pytest.fixture(scope="module")
def input_scales(pair: tuple[Path, Path]) -> dict[Path, dict[str, float]]:
    """Input scales of both checkpoints, calibrated on the prompts."""
    found = {}
    for directory in pair:
        with CheckpointWeights(directory) as weights:
            found[directory] = calibrate_input_scales(load_model_config(directory), weights, [*chain(*PROMPTS)])
    return found


def decoded(target: Any, draft: Any, policy: Any, temperature: float = 0.0) -> tuple[list[list[int]], int, int]:
    """Run all prompts in one executor -> tokens of each, drafts accepted, rows pruned. Each prompt has its own seed."""
    max_draft_len = 0 if policy.name == "off" else MAX_DRAFT_LEN
    collector, clock = Collector(), ManualClock()
    executor = assemble(
        target,
        draft if max_draft_len else None,
        policy,
        ExecutorConfig(),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=max_draft_len,
        clock=clock,
        enter_mode=stay,
    )
    with executor:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=index)
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            clock.advance(0.001)
            executor.check_integrity()
    assert set(collector.reasons.values()) == {"length"}
    stats = [request.stats for request in collector.requests.values()]
    return (
        [collector.tokens[str(index)] for index in range(len(PROMPTS))],
        sum(each.num_accepted_tokens for each in stats),
        sum(each.num_pruned_rows for each in stats),
    )


@pytest.fixture(scope="module")
def plain_tokens(pair: tuple[Path, Path]) -> list[list[int]]:
    """The tokens of the interpreted target alone."""
    return decoded(open_interpreted(pair[0]), None, POLICIES["off"]())[0]


@pytest.mark.parametrize("policy", ["fixed", "erratic"])
def test_speculation_changes_nothing(pair: tuple[Path, Path], plain_tokens: list[list[int]], policy: str) -> None:
    target, draft = open_interpreted(pair[0], exit_layers=(1,)), open_interpreted(pair[1])
    tokens, num_accepted, num_pruned = decoded(target, draft, POLICIES[policy]())
    assert tokens == plain_tokens
    assert num_accepted > 0
    assert (num_pruned > 0) == (policy == "erratic")


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("temperature", [*pick([], [0.0]), 0.8])
def test_speculation_in_fp8_changes_nothing(
    pair: tuple[Path, Path], input_scales: dict[Path, dict[str, float]], temperature: float
) -> None:
    """Target and draft in fp8, rows pruned at random: what the fp8 target says alone, and another's than the plain
    target's."""

    def opened(directory: Path, exit_layers: tuple[int, ...] = ()) -> InterpretedEngine:
        return open_interpreted(directory, exit_layers, input_scales[directory], dtype="bfloat16")

    alone = decoded(opened(pair[0]), None, POLICIES["off"](), temperature)[0]
    assert alone != decoded(open_interpreted(pair[0], dtype="bfloat16"), None, POLICIES["off"](), temperature)[0]
    for policy in ("fixed", "erratic"):
        tokens, num_accepted, num_pruned = decoded(
            opened(pair[0], (1,)), opened(pair[1]), POLICIES[policy](), temperature
        )
        assert tokens == alone
        assert num_accepted > 0
        assert (num_pruned > 0) == (policy == "erratic")


def test_tokens_are_the_references(pair: tuple[Path, Path], plain_tokens: list[list[int]]) -> None:
    """Greedy tokens of the interpreted engine are the argmax of the torch reference, whatever the CPU engine says."""
    with CheckpointWeights(pair[0]) as weights:
        reference = ReferenceModel(load_model_config(pair[0]), weights)
    for prompt, tokens in zip(PROMPTS, plain_tokens, strict=True):
        logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(("most", "expected"), [(None, [0, 4, 2]), (1, [0, 1, 1]), (3, [0, 3, 2]), (9, [0, 4, 2])])
def test_drafting(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, most: int | None, expected: list[int]
) -> None:
    """Greedy drafts are the reference's, and the stop rule is asked with the margins of all pending drafts."""
    asked: list[list[np.ndarray]] = []

    def goes_on(stop: Any, modes: list[int], margins: list[np.ndarray], sources: list[np.ndarray]) -> list[bool]:
        assert stop is rule
        assert [by.tolist() for by in sources] == [[native.BY_MODEL] * len(pending) for pending in margins]
        assert modes == [native.GREEDY] * len(margins)
        asked.append([pending.copy() for pending in margins])
        return [len(pending) < most for pending in margins]

    monkeypatch.setattr(draft_loop.draft_stop, "goes_on", goes_on)
    rule: Any = None if most is None else object()
    sampling = SamplingTable(MAX_BATCH_SIZE, 320, MAX_DRAFT_LEN)
    builder = BatchBuilder(np.array([[2], [1], [0]], np.int32))
    requests = []
    lengths = np.array([5, 9, 3], np.int32)
    for slot, length in zip((2, 0, 1), lengths, strict=True):
        params = SamplingParams(max_tokens=20, temperature=0.0)
        prompt = np.random.default_rng(slot).integers(2, 320, length)
        request = Request(str(slot), prompt, params, max_seq_len=MAX_SEQ_LEN, max_draft_len=MAX_DRAFT_LEN)
        sampling.bind(slot, request)
        builder.add(slot, request.tokens, 0, int(length), 1)
        requests.append(request)
    zeros, wanted = np.zeros(3, np.int32), np.array([0, 4, 2], np.int32)
    with open_interpreted(pair[1]) as engine:
        batch = builder.build()
        drafted = engine.draft(DraftBatch(batch, sampling.array, lengths, zeros, wanted, MAX_DRAFT_LEN, rule))
    assert drafted.tolist() == expected
    with CheckpointWeights(pair[1]) as weights:
        reference = ReferenceModel(load_model_config(pair[1]), weights)
    margins = []
    for request, length, count in zip(requests, lengths, drafted, strict=True):
        logits = reference.logits(request.tokens[: length + count].tolist())[length - 1 : length - 1 + count]
        assert logits.argmax(-1).tolist() == request.tokens[length : length + count].tolist()
        best = logits.topk(2).values
        margins.append((best[:, 0] - best[:, 1]).numpy())
    if rule is not None:
        np.testing.assert_allclose(np.concatenate(asked[0]), [margins[1][0], margins[2][0]], atol=1e-4)
        np.testing.assert_allclose(asked[-1][0], margins[1][: len(asked[-1][0])], atol=1e-4)


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> Iterator[InterpretedEngine]:
    with open_interpreted(pair[0], exit_layers=(1, 2)) as opened:
        yield opened


def one_batch(engine: InterpretedEngine, *rows: tuple[int, int, int]) -> Any:
    """Rows (slot, first, end) of made-up tokens; slot s has block 2 - s."""
    table = np.array([[2], [1], [0]], np.int32)
    builder = BatchBuilder(table)
    for slot, first, end in rows:
        tokens = np.random.default_rng(slot).integers(0, 320, 64).astype(np.int32)
        builder.add(slot, tokens, first, end, end - first)
    return builder.build()


def test_early_exit_scores(pair: tuple[Path, Path], engine: InterpretedEngine) -> None:
    weights = CheckpointWeights(pair[0])
    batch = one_batch(engine, (1, 0, 5), (0, 0, 3))
    engine.run_segment(batch, 0)
    rows = np.array([0, 3, 6, 7], np.int32)
    candidates = np.random.default_rng(0).integers(0, 320, (4, 8)).astype(np.int32)
    candidates[1, 5:] = -1
    hidden = engine._hidden_rows(8)[rows].numpy()
    scores = engine.early_exit(rows, candidates)
    expected = early_exit_reference(
        hidden,
        weights.float32("model.norm.weight", (64,)),
        weights.float32("lm_head.weight", (320, 64)),
        candidates,
        load_model_config(pair[0]).rms_norm_eps,
    )
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_array_equal(engine.early_exit(rows, candidates[:, :3]), scores[:, :3])
    engine.run_segment(batch, 1)  # hidden rows stayed as they are
    assert engine.early_exit(rows[:0], candidates[:0]).shape == (0, 8)


def test_a_pass_without_logits(engine: InterpretedEngine) -> None:
    """A context chunk that does not reach the end wants none; the pass behind it sees its KV."""
    batch = one_batch(engine, (0, 0, 9))
    whole = engine.forward(batch).copy()
    first = one_batch(engine, (0, 0, 6))
    assert engine.forward(type(first)(*[*_fields(first)[:4], first.logit_rows[:0], first.block_table])).shape == (
        0,
        320,
    )
    np.testing.assert_allclose(engine.forward(one_batch(engine, (0, 6, 9))), whole[6:], atol=1e-5)


def _fields(batch: Any) -> list[Any]:
    return [getattr(batch, name) for name in type(batch).__slots__]


def test_bad_calls_are_refused(engine: InterpretedEngine) -> None:
    batch = one_batch(engine, (0, 0, 4), (1, 0, 2))
    with pytest.raises(InvalidArgumentError, match="no hidden rows"):
        engine.run_segment(batch, 1)
    with pytest.raises(InvalidArgumentError, match="segment is 3"):
        engine.run_segment(batch, 3)
    engine.run_segment(batch, 0)
    for rows in ([1, 1], [0, 6], [-1, 2]):
        with pytest.raises(InvalidArgumentError, match="ascending"):
            engine.compact_rows(np.array(rows, np.int32))
    engine.compact_rows(np.array([0, 4], np.int32))
    with pytest.raises(InvalidArgumentError, match="6 rows, the segment before left 2"):
        engine.run_segment(batch, 1)
    with pytest.raises(InvalidArgumentError, match="token id 320"):
        engine.early_exit(np.array([0], np.int32), np.full((1, 8), 320, np.int32))
    for change, match in (
        ((slice(None), "token_ids", 320), "token_ids"),
        ((0, "positions", 2), "consecutive"),
        ((slice(None), "block_table", 1), "each must be there once"),
        ((slice(None), "block_table", 3), "must be 0 to 2"),
    ):
        index, name, value = change
        wrong = one_batch(engine, (0, 0, 4), (1, 0, 2))
        getattr(wrong, name)[index] = value
        with pytest.raises(InvalidArgumentError, match=match):
            engine.run_segment(wrong, 0)
    engine.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.run_segment(batch, 0)
