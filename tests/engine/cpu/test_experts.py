"""Mixtures of experts: who is chosen, how many experts a pass reads, and bits that do not depend on who shares them."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.cpu_engine import engine_model, engine_tensors
from faser_trtllm.builder.engine_file import write_engine_file
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.experts import CLAMPED, SILU, SOFTMAX, TOP_K_SOFTMAX, ExpertsConfig
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import Dtype, Weights, converted, expected_shapes
from faser_trtllm.partition.core_set import CoreSet
from tests.engine.conftest import OpenHarness
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.support.moe_checkpoints import make_moe_checkpoint
from tests.support.tiny_model import TinyConfig, TinyModel

SCHEMES = ("none", "int8", "int4:32", "int4:128", "W8A8", "W4A8:32", "W4A8:128", "mxfp4")
EXPERTS = ExpertsConfig(16, 4, 128, SOFTMAX, norm_topk=True)


def tiny(experts: ExpertsConfig = EXPERTS, **options) -> TinyModel:
    sizes = {"num_layers": 2, "hidden_size": 128, "intermediate_size": experts.intermediate_size}
    return TinyModel(TinyConfig(experts=experts, **(sizes | options)))


def random_tokens(model: TinyModel, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count).tolist()


def route_all_alike(model: TinyModel) -> TinyModel:
    """With equal logits, so that all rows take the first experts, each with the same weight."""
    for layer in model.layers:
        layer["router"].zero_()
    return model


KINDS = {
    "normed": EXPERTS,
    "not_normed": replace(EXPERTS, norm_topk=False, top_k=1, num_experts=70),
    "top_k_softmax": replace(EXPERTS, scoring=TOP_K_SOFTMAX, norm_topk=False, has_bias=True),
    "clamped": replace(EXPERTS, scoring=TOP_K_SOFTMAX, norm_topk=False, activation=CLAMPED, has_bias=True),
    "shared": replace(EXPERTS, norm_topk=False, shared_size=256),
    "padded": ExpertsConfig(5, 2, 90, SOFTMAX, norm_topk=True, shared_size=70),
}


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [(kind, scheme) for kind in KINDS for scheme in SCHEMES if kind != "padded" or "4" not in scheme],  # in groups
)
def test_logits_are_the_references(open_harness: OpenHarness, kind: str, scheme: str) -> None:
    """Rows in chunks. Where two experts' scores are nearly equal, rounding decides, so a few rows may go elsewhere."""
    sizes = {"hidden_size": 70} if kind == "padded" else {}
    model = tiny(KINDS[kind], quantization=scheme, **sizes)
    harness = open_harness(model)
    tokens = random_tokens(model, 120)
    found = np.concatenate([harness.run([(0, tokens, first, end)])[0] for first, end in pairwise((0, 50, 119, 120))])
    wanted = model.logits(tokens, rounded=True).numpy()
    errors = np.sqrt(np.square(found - wanted).mean(-1)) / wanted.std()
    assert np.median(errors) < (0.03 if "A8" in scheme else 0.01)
    assert (errors > 0.1).mean() < 0.1


class DrawnWeights(Weights):
    """Noise by a tensor's name."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_shapes(config)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dtype: Dtype) -> np.ndarray:
        shape = self._shapes[name]
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        scale = 2 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        return converted(noise * np.float32(scale) + np.float32("norm" in name), dtype)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_builder_packs_is_the_checkpoint(tmp_path: Path, kind: str, family: str) -> None:
    sizes = {"num_experts": KINDS[kind].num_experts, "expert_size": 50, "hidden_size": 72, "num_heads": 2}
    loaded = load_model_config(make_moe_checkpoint(tmp_path / "checkpoint", family, num_layers=1, **sizes))
    config = replace(loaded, intermediate_size=50, experts=replace(KINDS[kind], intermediate_size=50))
    weights, tokens = DrawnWeights(config), list(range(3, 43))
    path = tmp_path / "rank0.engine"
    write_engine_file(path, engine_model(config, 64), [0, 1], engine_tensors(config, weights))
    limits = {"num_blocks": 4, "tokens_per_block": 16, "max_batch_size": 1, "max_num_tokens": 64}
    with CoreSet() as core_set, CpuEngine.open(path, core_set, **limits) as engine:
        assert (engine.spec.num_experts, engine.spec.top_k) == (KINDS[kind].num_experts, KINDS[kind].top_k)
        found = Harness(engine).run([(0, tokens, 0, 40)])[0]
    wanted = ReferenceModel(config, weights, round_to_bf16=True).logits(tokens).numpy()
    errors = np.sqrt(np.square(found - wanted).mean(-1)) / wanted.std()
    assert np.median(errors) < 0.02


@pytest.mark.parametrize("other", [{"activation": SILU}, {"has_bias": False}])
def test_another_activation_and_no_biases_are_another_model(open_harness: OpenHarness, other: dict[str, Any]) -> None:
    """The logits differ by more than test_logits_are_the_references tolerates."""
    model = tiny(KINDS["clamped"])
    tokens = random_tokens(model, 60)
    found = open_harness(model).run([(0, tokens, 0, 60)])[0]
    model.config = replace(model.config, experts=replace(KINDS["clamped"], **other))
    if "has_bias" in other:
        for layer in model.layers:
            layer |= {name: torch.zeros_like(value) for name, value in layer.items() if name.endswith("_bias")}
    wanted = model.logits(tokens, rounded=True).numpy()
    assert np.median(np.sqrt(np.square(found - wanted).mean(-1)) / wanted.std()) > 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_number_of_rows_of_one_expert_gives_the_same_bits(open_harness: OpenHarness, scheme: str) -> None:
    """Each kernel has paths of its own for few rows, for whole tiles and for many rows."""
    model = route_all_alike(tiny(replace(EXPERTS, top_k=1), quantization=scheme))
    harness = open_harness(model)
    tokens = random_tokens(model, 64)
    alone = [harness.run([(0, tokens, i, i + 1)])[0][0] for i in range(64)]
    for count in pick((2, 3, 7, 17, 49, 64), tuple(range(2, 65))):
        np.testing.assert_array_equal(harness.run([(1, tokens, 0, count)])[0], alone[:count])
        assert harness.engine.distinct_experts == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_more_pairs_than_the_buffers_hold(open_harness: OpenHarness, scheme: str) -> None:
    """Passes of 400 rows of 8 experts, of 100 rows, and of rows that are alone, among experts that all and few take."""
    model = tiny(replace(EXPERTS, top_k=8), quantization=scheme)
    harness = open_harness(model)
    tokens = random_tokens(model, 400)
    whole = harness.run([(0, tokens, 0, 400)])[0]
    parts = [harness.run([(1, tokens, first, end)])[0] for first, end in pairwise((0, 100, 200, 397, 398, 399, 400))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_one_thread_and_more(open_harness: OpenHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CPU_TEAM", "always")
    model = tiny(replace(EXPERTS, shared_size=96))
    tokens = random_tokens(model, 300)
    found = [open_harness(model, num_threads=count).run([(0, tokens, 0, 300)])[0] for count in (1, 2)]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("scoring", [SOFTMAX, TOP_K_SOFTMAX])
@pytest.mark.parametrize("top_k", [1, 3, 16])
def test_of_equal_scores_the_lowest_index_wins(open_harness: OpenHarness, scoring: str, top_k: int) -> None:
    model = route_all_alike(tiny(replace(EXPERTS, top_k=top_k, scoring=scoring)))
    harness = open_harness(model)
    tokens = random_tokens(model, 30)
    logits, chosen = model.run(tokens)
    assert all(sorted(row) == list(range(top_k)) for row in chosen[0].tolist())
    found = harness.run([(0, tokens, 0, 30)])[0]
    assert np.abs(found - logits.numpy()).max() < 0.02 * logits.abs().max()
    assert harness.engine.distinct_experts == top_k


def test_equal_scores_at_the_last_place(open_harness: OpenHarness) -> None:
    """Experts come in pairs of equal scores and one of three is taken, so that a pair is always torn."""
    model = tiny(replace(EXPERTS, top_k=3))
    for layer in model.layers:
        layer["router"][1::2] = layer["router"][0::2]
    harness = open_harness(model)
    tokens = random_tokens(model, 60)
    logits, chosen = model.run(tokens)
    assert all(sorted(row)[0] % 2 == 0 for layer in chosen for row in layer.tolist())
    found = harness.run([(0, tokens, 0, 60)])[0]
    assert np.median(np.abs(found - logits.numpy()).max(-1)) < 0.02 * logits.abs().max()


def test_distinct_experts_are_those_of_a_set(open_harness: OpenHarness) -> None:
    """Over passes of several requests, prompts in chunks and single rows."""
    model = tiny(replace(EXPERTS, num_experts=40, top_k=2))
    harness = open_harness(model)
    tokens = [random_tokens(model, 60, seed) for seed in range(3)]
    routes = [model.run(sequence)[1] for sequence in tokens]
    for step in ([(0, 0, 9), (2, 0, 1)], [(2, 1, 40), (1, 0, 7), (0, 9, 10)], [(1, 7, 8)], [(0, 10, 60)]):
        harness.run([(slot, tokens[slot], first, end) for slot, first, end in step])
        counts = [
            len({expert for slot, first, end in step for expert in routes[slot][layer][first:end].flatten().tolist()})
            for layer in range(model.config.num_layers)
        ]
        assert harness.engine.distinct_experts == sum(counts) / len(counts)


def test_distinct_experts_of_segments_count_the_rows_that_ran(open_harness: OpenHarness) -> None:
    model = tiny(replace(EXPERTS, num_experts=40, top_k=2), num_layers=3)
    harness = open_harness(model, segments=[0, 1, 3])
    tokens = random_tokens(model, 20)
    routes = [[set(row) for row in layer.tolist()] for layer in model.run(tokens)[1]]
    batch = harness.batch([(0, tokens, 0, 20)])
    harness.engine.run_segment(batch, 0)
    first = len(set().union(*routes[0]))
    assert harness.engine.distinct_experts == first
    rows = np.arange(6, dtype=np.int32)
    harness.engine.compact_rows(rows)
    harness.engine.run_segment(keep_rows(batch, rows, [6]), 1)
    others = [len(set().union(*layer[:6])) for layer in routes[1:]]
    assert harness.engine.distinct_experts == pytest.approx((first + sum(others)) / 3)


def test_a_dense_model_has_no_experts(open_harness: OpenHarness) -> None:
    harness = open_harness(TinyModel(TinyConfig()))
    harness.run([(0, [1, 2, 3], 0, 3)])
    assert (harness.engine.spec.num_experts, harness.engine.spec.top_k, harness.engine.distinct_experts) == (0, 0, 0.0)


def test_a_row_that_is_no_number_spoils_no_other(open_harness: OpenHarness) -> None:
    model = tiny(tied=False)
    model.embedding = model.embedding.clone()
    model.embedding[7] = torch.nan
    harness = open_harness(model)
    tokens = [token for token in random_tokens(model, 50) if token != 7]
    wanted = harness.run([(0, tokens, 0, len(tokens))])[0]
    spoilt, found = harness.run([(1, [3, 7, 4], 0, 3), (0, tokens, 0, len(tokens))])
    np.testing.assert_array_equal(found, wanted)
    assert np.isnan(spoilt[1:]).all()


def test_a_router_with_too_few_scores_gives_no_numbers(open_harness: OpenHarness) -> None:
    model = tiny(replace(EXPERTS, scoring=TOP_K_SOFTMAX, norm_topk=False, has_bias=True))
    model.layers[1]["router_bias"][1:] = -torch.inf
    assert np.isnan(open_harness(model).run([(0, [3, 7, 4], 0, 3)])[0]).all()


def test_memory_does_not_grow_with_what_rows_give_their_experts(open_harness: OpenHarness) -> None:
    """Buffers of pairs end at some size; what is left is of dense rows, and the routes."""
    model = tiny(ExpertsConfig(32, 16, 512, SOFTMAX, norm_topk=True))
    sizes = [open_harness(model, max_num_tokens=rows).engine.memory_bytes for rows in (1024, 2048)]
    dense = TinyModel(TinyConfig(num_layers=2, hidden_size=128, intermediate_size=64))
    of_dense = [open_harness(dense, max_num_tokens=rows).engine.memory_bytes for rows in (1024, 2048)]
    routes = 1024 * (16 * 4 * 4 + 64 * 4)
    assert sizes[1] - sizes[0] <= of_dense[1] - of_dense[0] + routes
