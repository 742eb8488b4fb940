"""The engine computes the model: against the same weights in plain torch, over ragged passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError
from tests.engine.conftest import OpenHarness
from tests.support.engine_harness import Harness
from tests.support.tiny_model import TinyConfig, TinyModel

CONFIGS = {
    "plain": TinyConfig(),
    "untied_biases": TinyConfig(tied=False, biases=True),
    "qk_norm": TinyConfig(qk_norm=True, head_dim=64, hidden_size=70, intermediate_size=90),
    "one_head": TinyConfig(num_heads=1, num_kv_heads=1, head_dim=16, hidden_size=34, intermediate_size=6),
    "group_of_6": TinyConfig(num_heads=6, num_kv_heads=1, head_dim=20),
    "group_of_9": TinyConfig(num_heads=9, num_kv_heads=1, head_dim=18, vocab_size=64),
    "no_groups": TinyConfig(num_heads=3, num_kv_heads=3, head_dim=80),
    "head_dim_2": TinyConfig(head_dim=2, num_heads=8),
    "head_dim_96": TinyConfig(head_dim=96),
    "norms_all_heads": TinyConfig(qk_norm=True, norms_all_heads=True, head_dim=40, num_kv_heads=2),
    "head_dim_128": TinyConfig(head_dim=128, num_layers=2, qk_norm=True, biases=True),
    "head_dim_256": TinyConfig(head_dim=256, num_heads=2, num_kv_heads=1, num_layers=2),
    "window": TinyConfig(windows=(37,)),
    "windows": TinyConfig(windows=(37, 0)),
    "sinks": TinyConfig(sinks=True, windows=(0, 21), biases=True),
    "sinks_long_window": TinyConfig(
        sinks=True, windows=(128, 0), head_dim=64, num_heads=8, num_kv_heads=1, num_layers=2
    ),
    "window_of_1": TinyConfig(windows=(1,), num_layers=2),
    "int8": TinyConfig(quantization="int8", biases=True),
    "int8_padded": TinyConfig(
        quantization="int8", quantize_lm_head=True, head_dim=64, hidden_size=70, intermediate_size=290
    ),
    "int4": TinyConfig(quantization="int4", qk_norm=True),
    "int4_head": TinyConfig(quantization="int4", quantize_lm_head=True, tied=False),
    "int4_groups_of_128": TinyConfig(
        quantization="int4:128", hidden_size=256, intermediate_size=384, num_layers=2, quantize_lm_head=True
    ),
    "W8A8": TinyConfig(quantization="W8A8", biases=True),
    "W8A8_padded": TinyConfig(
        quantization="W8A8", quantize_lm_head=True, head_dim=64, hidden_size=70, intermediate_size=290
    ),
    "W4A8": TinyConfig(quantization="W4A8", qk_norm=True),
    "W4A8_groups_of_128": TinyConfig(
        quantization="W4A8:128", hidden_size=256, intermediate_size=384, num_layers=2, quantize_lm_head=True
    ),
    "scaled_rope": TinyConfig(rope_attention_factor=1.3, rope_theta=500000.0),
}


def _relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - wanted).mean()) / wanted.std())


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_passes_match_torch(name: str, open_harness: OpenHarness) -> None:
    """Three requests, prompts in chunks, frontiers of 1 to 5 rows mixed with context chunks."""
    model = TinyModel(CONFIGS[name])
    harness = open_harness(model, tokens_per_block=16)
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, model.config.vocab_size, length).tolist() for length in (141, 60, 97)]
    steps = [
        [(0, 0, 64), (1, 0, 7)],
        [(2, 0, 33), (0, 64, 130), (1, 7, 40)],
        [(1, 40, 41), (0, 130, 135), (2, 33, 90)],
        [(2, 90, 94), (1, 41, 45), (0, 135, 136)],
        [(0, 136, 141), (1, 45, 60), (2, 94, 97)],
    ]
    found: list[list[np.ndarray]] = [[], [], []]
    for step in steps:
        logits = harness.run([(slot, tokens[slot], first, end) for slot, first, end in step])
        for (slot, _, _), rows in zip(step, logits, strict=True):
            found[slot].append(rows)
    for slot, sequence in enumerate(tokens):
        rows = np.concatenate(found[slot])
        # Inputs of 8 bits that lie between two integers may fall to either side, and layers make more of it.
        rounded, exact = (0.03, 0.08) if "A8" in model.config.quantization else (0.01, 0.04)
        assert _relative_error(rows, model.logits(sequence, rounded=True).numpy()) < rounded
        assert _relative_error(rows, model.logits(sequence).numpy()) < exact


@pytest.mark.parametrize(
    "other",
    [{"windows": (36, 0)}, {"windows": (38, 0)}, {"windows": (0, 37)}, {"windows": (37,)}, {"sinks": False}],
    ids=["one_less", "one_more", "other_layers", "all_layers", "no_sinks"],
)
def test_other_windows_and_no_sinks_are_another_model(other: dict[str, Any], open_harness: OpenHarness) -> None:
    """The logits differ by more than test_ragged_passes_match_torch tolerates."""
    model = TinyModel(TinyConfig(windows=(37, 0), sinks=True))
    tokens = np.random.default_rng(11).integers(0, model.config.vocab_size, 140).tolist()
    found = open_harness(model).run([(0, tokens, 0, 140)])[0]
    assert _relative_error(found, model.logits(tokens, rounded=True).numpy()) < 0.01
    model.config = replace(model.config, **other)
    assert _relative_error(found, model.logits(tokens, rounded=True).numpy()) > 0.02


@pytest.mark.parametrize(("windows", "first_needed"), [((21, 40), 60), ((21, 0), 0), ((40, 21), 60)])
def test_blocks_that_a_layer_sees_must_be_there(
    windows: tuple[int, ...], first_needed: int, open_harness: OpenHarness
) -> None:
    """Blocks before what any layer sees may be anything; no others."""
    model = TinyModel(TinyConfig(windows=windows, num_layers=2))
    tokens = np.random.default_rng(12).integers(0, model.config.vocab_size, 101).tolist()
    harness = open_harness(model, tokens_per_block=16)
    harness.run([(0, tokens, 0, 100)])
    wanted = harness.run([(0, tokens, 100, 101)])[0]
    num_free = first_needed // 16
    harness.block_table[0, :num_free] = -1
    np.testing.assert_array_equal(harness.run([(0, tokens, 100, 101)])[0], wanted)
    harness.block_table[0, num_free] = -1
    with pytest.raises(InvalidArgumentError):
        harness.run([(0, tokens, 100, 101)])


@pytest.mark.parametrize("name", [name for name in CONFIGS if "A8" in CONFIGS[name].quantization])
def test_a_layer_of_8_bit_inputs_is_the_references(name: str, open_harness: OpenHarness) -> None:
    """To the last bits of most rows: in the others an input lies between two integers."""
    model = TinyModel(replace(CONFIGS[name], num_layers=1))
    tokens = np.random.default_rng(10).integers(0, model.config.vocab_size, 120).tolist()
    found, wanted = open_harness(model).run([(0, tokens, 0, 120)])[0], model.logits(tokens, rounded=True).numpy()
    errors = [_relative_error(row, its) for row, its in zip(found, wanted, strict=True)]
    assert np.median(errors) < 1e-5


def test_long_context_matches_torch(open_harness: OpenHarness) -> None:
    """Past the 256 positions after which attention rescales its sum."""
    model = TinyModel(TinyConfig(num_layers=2))
    harness = open_harness(model)
    tokens = np.random.default_rng(4).integers(0, model.config.vocab_size, 620).tolist()
    found = [harness.run([(3, tokens, first, min(first + 200, 620))])[0] for first in range(0, 620, 200)]
    assert _relative_error(np.concatenate(found), model.logits(tokens).numpy()) < 0.04


def test_rewinds_overwrite_stale_kv(open_harness: OpenHarness) -> None:
    """Rejected drafts leave keys and values behind; the next rows at those positions replace them."""
    model = TinyModel(TinyConfig())
    harness = open_harness(model)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, model.config.vocab_size, 80).tolist()
    found = [harness.run([(0, tokens, 0, 50)])[0]]
    position = 50
    while position < 80:
        num_rows = int(rng.integers(1, 6))
        drafts = tokens[: position + 1] + rng.integers(0, model.config.vocab_size, num_rows).tolist()
        rows = harness.run([(0, drafts, position, position + num_rows)])[0]
        found.append(rows[:1])
        position += 1
    assert _relative_error(np.concatenate(found), model.logits(tokens, rounded=True).numpy()) < 0.01


def test_only_wanted_rows_give_logits(open_harness: OpenHarness) -> None:
    model = TinyModel(TinyConfig())
    harness = open_harness(model)
    tokens = list(range(40))
    every = harness.run([(0, tokens, 0, 40)])[0]
    batch = harness.batch([(0, tokens, 0, 40)])
    batch.logit_rows[:3] = (2, 17, 39)
    chosen = type(batch)(
        batch.slots, batch.cu_rows, batch.token_ids, batch.positions, batch.logit_rows[:3], batch.block_table
    )
    logits = harness.engine.forward(chosen)
    assert logits.shape == (3, 128)
    np.testing.assert_array_equal(logits[:, : model.config.vocab_size], every[[2, 17, 39]])


def _poisoned(model: TinyModel, value: float) -> int:
    """Make the last token's embedding unusable, so that its rows write NaN keys and values."""
    token = model.config.vocab_size - 1
    model.embedding[token] = value
    return token


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("window", "quantization"), [(0, "none"), (21, "none"), (0, "W8A8"), (0, "W4A8")])
def test_nan_stays_in_its_request(value: float, window: int, quantization: str, open_harness: OpenHarness) -> None:
    """Neither batch mates, nor earlier rows, nor the next owner of the blocks see a failed request's NaN."""
    config = TinyConfig(tied=False, windows=(window,), quantization=quantization)
    model = TinyModel(replace(config, quantize_lm_head=quantization != "none"))
    bad = _poisoned(model, value)
    tokens = np.random.default_rng(6).integers(0, bad, 90).tolist()
    clean = open_harness(model).run([(0, tokens, 0, 90)])[0]

    harness: Harness = open_harness(model)
    failing = tokens[:40] + [bad] * 50
    mates = harness.run([(1, failing, 0, 90), (0, tokens, 0, 90)])
    assert np.isnan(mates[0][41:]).all()
    np.testing.assert_array_equal(mates[0][:40], clean[:40])
    np.testing.assert_array_equal(mates[1], clean)

    harness.block_table[2] = harness.block_table[1]
    for length in range(1, 90, 4):
        reused = harness.run([(2, [*tokens[:length], bad, bad], 0, length + 2)])[0]
        np.testing.assert_array_equal(reused[:length], clean[:length])


@pytest.mark.parametrize("position", [4, 5])
def test_nan_ends_with_the_window(position: int, open_harness: OpenHarness) -> None:
    """Rows that see an unusable token through no layer are as if it were another."""
    model = TinyModel(TinyConfig(tied=False, windows=(21,)))
    bad = _poisoned(model, np.nan)
    tokens = np.random.default_rng(9).integers(0, bad, 90).tolist()
    clean = open_harness(model).run([(0, tokens, 0, 90)])[0]
    tokens[position] = bad
    found = open_harness(model).run([(0, tokens, 0, 90)])[0]
    reach = position + model.config.num_layers * (model.config.window(0) - 1) + 1
    np.testing.assert_array_equal(found[:position], clean[:position])
    assert np.isnan(found[position : position + 21]).all()
    np.testing.assert_array_equal(found[reach:], clean[reach:])
