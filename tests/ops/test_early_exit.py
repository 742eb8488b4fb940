"""Early exit: the engine's scores against the plain formula and against the LM head itself."""

import numpy as np
import pytest
import torch

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.prune_rows import rank_and_gap
from lab.reference.early_exit import early_exit_reference
from tests.engine.conftest import open_harness  # noqa: F401
from tests.support.tiny_model import TinyConfig, TinyModel

CONFIGS = {
    "tied": TinyConfig(num_layers=2),
    "untied": TinyConfig(num_layers=2, hidden_size=192, tied=False, vocab_size=130),
    "int8": TinyConfig(num_layers=2, hidden_size=74, vocab_size=65, quantization="int8", quantize_lm_head=True),
    "int4": TinyConfig(num_layers=2, vocab_size=130, quantization="int4", quantize_lm_head=True),
    "odd": TinyConfig(num_layers=2, hidden_size=74, vocab_size=65),
}
NUM_ROWS, NUM_CANDIDATES = 9, 8


@pytest.fixture(params=CONFIGS)
def started(request, open_harness):  # noqa: F811
    """An engine whose first segment has run, and its model."""
    model = TinyModel(CONFIGS[request.param])
    harness = open_harness(model, segments=[0, 1, 2])
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, NUM_ROWS)
    harness.engine.run_segment(harness.batch([(0, tokens, 0, NUM_ROWS)]), 0)
    return harness, model, tokens


def candidates_of(model, num_rows=NUM_ROWS, seed=2):
    candidates = np.random.default_rng(seed).integers(0, model.config.vocab_size, (num_rows, NUM_CANDIDATES))
    candidates[0, 0], candidates[-1, -1] = model.config.vocab_size - 1, 0
    return candidates.astype(np.int32)


def test_scores_are_the_formula(started):
    harness, model, _ = started
    rows = np.array([8, 0, 3, 3, 5], np.int32)
    candidates = candidates_of(model, rows.size)
    candidates[2, 1:] = -1
    scores = harness.engine.early_exit(rows, candidates)
    hidden = harness.engine.hidden_rows(NUM_ROWS)[rows]
    weights = model.final_norm.numpy(), model.lm_head.float().numpy()
    expected = early_exit_reference(hidden, *weights, candidates, model.config.rms_norm_eps)
    assert np.isneginf(expected[2, 1:]).all()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_the_formula_is_the_head_of_a_cut_model(started):
    """The reference is what a model of only the first layer would say, computed by torch."""
    harness, model, tokens = started
    short = TinyModel(model.config)
    short.layers = short.layers[:1]
    logits = short.logits(tokens.tolist()).numpy()
    candidates = candidates_of(model)
    found = harness.engine.early_exit(np.arange(NUM_ROWS, dtype=np.int32), candidates)
    expected = np.take_along_axis(logits, candidates.astype(np.int64), 1)
    np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(logits).max())
    assert np.abs(expected).max() > 0.3 * np.abs(logits).max(), "the tolerance must not hide everything"


def test_a_row_s_scores_do_not_depend_on_the_others(started):
    harness, model, _ = started
    engine = harness.engine
    candidates = candidates_of(model)
    together = engine.early_exit(np.arange(NUM_ROWS, dtype=np.int32), candidates)
    for row in range(NUM_ROWS):
        alone = engine.early_exit(np.array([row], np.int32), candidates[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])
        one = engine.early_exit(np.array([row], np.int32), candidates[row : row + 1, 3:4])
        assert one[0, 0] == together[row, 3]
    many = np.tile(np.arange(NUM_ROWS, dtype=np.int32), 60)
    np.testing.assert_array_equal(engine.early_exit(many, np.tile(candidates, (60, 1))), np.tile(together, (60, 1)))


def test_scores_follow_rows_through_compaction(started):
    harness, model, _ = started
    engine = harness.engine
    candidates = candidates_of(model)
    before = engine.early_exit(np.arange(NUM_ROWS, dtype=np.int32), candidates)
    kept = np.array([1, 4, 8], np.int32)
    engine.compact_rows(kept)
    after = engine.early_exit(np.arange(3, dtype=np.int32), candidates[kept])
    np.testing.assert_array_equal(after, before[kept])


def test_wrong_use_is_refused(started):
    harness, model, tokens = started
    engine = harness.engine
    candidates = candidates_of(model, 1)
    for row in (-1, NUM_ROWS):
        with pytest.raises(InvalidArgumentError, match="early exit of 1 rows"):
            engine.early_exit(np.array([row], np.int32), candidates)
    for token in (-2, model.config.vocab_size):
        with pytest.raises(InvalidArgumentError, match="token id"):
            engine.early_exit(np.array([0], np.int32), np.full((1, 1), token, np.int32))
    with pytest.raises(ValueError, match="2 rows need candidates"):
        engine.early_exit(np.array([0, 1], np.int32), candidates)
    assert engine.early_exit(np.zeros(0, np.int32), np.zeros((0, 8), np.int32)).shape == (0, 8)
    engine.run_segment(harness.batch([(0, tokens, 0, NUM_ROWS)]), 1)
    with pytest.raises(InvalidArgumentError):  # the pass has ended: no hidden rows between segments
        engine.early_exit(np.array([0], np.int32), candidates)


def test_rank_and_gap():
    scores = np.array([[3, 1, 2], [1, 5, 2], [2, 2, 1], [-1, -np.inf, -np.inf]], np.float32)
    rank, gap = rank_and_gap(scores, np.array([2, 0, 1, 0], np.int32))
    assert (rank.dtype, gap.dtype) == (np.int32, np.float32)
    assert rank.tolist() == [1, 2, 0, 0]
    assert gap.tolist() == [1, 4, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_rank_is_the_place_in_a_sorted_list(seed):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((20, 8)).astype(np.float32)
    places = rng.integers(0, 8, 20).astype(np.int32)
    rank, gap = rank_and_gap(scores, places)
    order = torch.tensor(scores).argsort(descending=True).numpy()
    assert rank.tolist() == [order[i].tolist().index(places[i]) for i in range(20)]
    assert ((gap == 0) == (rank == 0)).all()
