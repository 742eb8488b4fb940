"""Mixtures of experts on the cuda engine on the host: parity, counts of experts, graphs, pruning, drafts, refusals."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.engine.cuda.engine import load_weights
from faser_trtllm.engine.cuda.memory import weight_bytes
from faser_trtllm.engine.cuda.open import expert_buffers, open_cuda_engines
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.models.quantized_weight import MXFP4, quantize
from faser_trtllm.models.weights import CheckpointWeights
from lab.reference.cuda.experts.grouped_matmul import decoded
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import (
    MAX_BATCH_SIZE,
    WHOLE,
    build_moe_pair,
    open_engine,
    random_tokens,
    reference_logits,
)
from tests.engine.cuda.host_executor import HostGpu, generate, mixed_requests, repeating_requests
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.support.moe_checkpoints import make_moe_checkpoint
from tests.support.networks import load_trt
from tests.support.published_mixtures import publish

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
POLICIES = [
    *pick([], ["fixed:1", "price:prune=on", "fixed:3:ping_pong", "price:mode=ping_pong,prune=on"]),
    "fixed:4",
    "fixed:3:draft_ahead",
    "erratic",
]


class WatchedOps(ExactOps):
    """Remembers which experts a layer's rows took: sets by layer of the last pass, of the first num_rows."""

    num_rows = 0

    def route_rows(self, x, router, bias, num_used, choice, is_first, routes):
        super().route_rows(x, router, bias, num_used, choice, is_first, routes)
        if is_first:
            self.taken = []
        self.taken.append(set(routes.experts[: self.num_rows].reshape(-1).tolist()))

    def distinct(self) -> float:
        return sum(map(len, self.taken)) / len(self.taken)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_moe_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1, 2))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "gpt_oss"])
def test_ragged_passes_compute_what_the_reference_does(tmp_path: Path, family: str) -> None:
    if family == "qwen2_moe":  # with a shared expert, and weights that are not divided by their sum
        publish(tmp_path / "checkpoints" / "target", "qwen2", dtype="bfloat16", hidden_size=256)
    if family == "olmoe":  # with norms of all heads
        publish(tmp_path / "checkpoints" / "target", "olmoe", dtype="bfloat16", hidden_size=256, attention_bias=True)
    if family == "gpt_oss":  # with biases, sinks, a window of 9 in every second layer, and the clamped activation
        publish(tmp_path / "checkpoints" / "target", "gpt_oss", dtype="bfloat16", head_dim=64)
    engines = build_moe_pair(tmp_path, family)
    first, second = random_tokens(70), random_tokens(40, 1)
    wanted = [reference_logits(engines, "target", tokens) for tokens in (first, second)]
    with open_engine(engines.target_path) as engine:
        harness = Harness(engine)
        passes = [
            [(2, first, 0, 33)],
            [(2, first, 33, 70), (0, second, 0, 5)],
            [(0, second, 5, 6)],
            [(0, second, 6, 40), (2, first, 64, 70)],  # rows again, as after a rejected draft
        ]
        for rows in passes:
            for (slot, _, begin, end), logits in zip(rows, harness.run(rows), strict=True):
                expected = wanted[0 if slot == 2 else 1][begin:end]
                np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_mxfp4_changes_no_bit_of_gpt_oss_s_values(tmp_path: Path) -> None:
    """Experts of the checkpoint are in that format; the file keeps them in 17 of 64 of the bytes."""
    ways = ("none", "mxfp4")
    plain, packed = (build_moe_pair(tmp_path, "gpt_oss", quantization=way, head_dim=64) for way in ways)
    rows = [(2, random_tokens(70), 0, 33), (0, random_tokens(40, 1), 0, 5)]
    found = []
    for engines in (plain, packed):
        with open_engine(engines.target_path) as engine:
            found.append([logits.tobytes() for logits in Harness(engine).run(rows)])
    assert found[0] == found[1]
    assert packed.target_config["faser"]["quantization"]["quant_algo"] == "W4A16_MXFP4"
    num_values = NUM_LAYERS * NUM_EXPERTS * 3 * 64 * 64
    saved = weight_bytes(plain.target_path, Quantization.NONE) - weight_bytes(packed.target_path, Quantization.NONE)
    assert saved == num_values * 2 - num_values * 17 // 32
    assert_weights_are_counted(packed)


def test_mxfp4_is_the_cpu_engine_s(tmp_path: Path) -> None:
    """The checkpoint is in bf16; both quantize it alike."""
    engines = build_moe_pair(tmp_path, quantization="mxfp4")
    with CudaFile.open(engines.target_path) as file, CheckpointWeights(tmp_path / "checkpoints/target") as weights:
        gate_up = load_weights(file, torch.device("cpu")).layers[1].gate_up
        for index in range(NUM_EXPERTS):
            parts = (f"model.layers.1.mlp.experts.{index}.{part}_proj.weight" for part in ("gate", "up"))
            matrices = [quantize(weights.float32(name, (64, 64)), MXFP4) for name in parts]
            values = [each.numbers() * np.repeat(each.scales, 32, 1) for each in matrices]
            np.testing.assert_array_equal(decoded(gate_up)[index].float().numpy(), np.concatenate(values))


def test_buckets_and_graphs_change_no_bit_and_no_count(pair: EngineDir) -> None:
    """A pass of 3 rows runs as one of 4, whose dummy has no experts."""
    tokens, other = random_tokens(60), random_tokens(60, 1)
    batches = [[(0, tokens, 0, n), (3, other, 0, 1)] for n in (1, 2, 3, 7, 16, 33, 60)]
    narrow = [[(slot, tokens, 20, 21) for slot in range(count)] for count in range(1, MAX_BATCH_SIZE + 1)]
    found = []
    for captures in (False, True):
        ops = WatchedOps()
        with open_engine(pair.target_path, ops) as engine:
            if captures:
                assert engine.capture_graphs([WHOLE]) == 0
            harness, results = Harness(engine), []
            for rows in (*batches, *narrow):
                ops.num_rows = sum(end - begin for _, _, begin, end in rows)
                logits = harness.run(rows)
                assert engine.distinct_experts == ops.distinct()
                results.append((engine.distinct_experts, [each.tobytes() for each in logits]))
            found.append(results)
    assert found[0] == found[1]
    assert {distinct for distinct, _ in found[0][len(batches) :]} >= {float(TOP_K)}, "a row takes top_k"
    assert max(distinct for distinct, _ in found[0]) > 3 * TOP_K


def test_segments_and_dropped_rows_count_as_one_pass(pair: EngineDir) -> None:
    tokens, ops = random_tokens(12), WatchedOps()
    with open_engine(pair.target_path, ops) as engine:
        harness = Harness(engine)
        batch = harness.batch([(0, tokens, 0, 12)])
        ops.num_rows = 12
        engine.run_segment(batch, 0)
        kept = np.arange(5, dtype=np.int32)
        engine.compact_rows(kept)
        batch, ops.num_rows = keep_rows(batch, kept, [5]), 5
        engine.run_segment(batch, 1)
        logits = engine.run_segment(batch, 2)
        assert logits.shape[0] == 5
        assert len(ops.taken) == NUM_LAYERS
        assert engine.distinct_experts == ops.distinct()
        assert len(ops.taken[0]) > len(ops.taken[2])


def test_a_dense_model_has_no_experts(pair: EngineDir) -> None:
    with open_engine(pair.draft_path) as engine:
        Harness(engine).run([(0, random_tokens(5), 0, 5)])
        assert engine.distinct_experts == engine.spec.num_experts == 0
    with open_engine(pair.target_path) as engine:
        assert (engine.spec.num_experts, engine.spec.top_k) == (NUM_EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def alone(pair: EngineDir):
    """Requests, and their tokens without speculation, one request at a time."""
    requests = mixed_requests(True)
    return requests, generate(pair, "off", requests, max_batch_size=1, max_num_tokens=128)[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_is_the_targets_own(pair: EngineDir, alone, policy: str) -> None:
    requests, expected = alone
    tokens, found = generate(pair, policy, requests)
    assert tokens == expected
    assert found["num_drafts"] > 0 or policy.startswith("price")
    if policy == "erratic":
        assert found["num_pruned_rows"] > 0


@pytest.mark.slow
def test_drafts_of_the_text_change_no_token(pair: EngineDir) -> None:
    requests = repeating_requests()
    expected, _ = generate(pair, "off", requests, max_batch_size=1, max_num_tokens=128)
    for policy in ("erratic", *pick([], ["fixed:4", "price:prune=on"])):
        tokens, found = generate(pair, policy, requests, drafters="suffix,model")
        assert tokens == expected
        assert min(found[f"num_tested_drafts_{name}"] for name in ("suffix", "model")) > 0


@pytest.mark.slow
def test_token_trees_change_no_token(pair: EngineDir, alone) -> None:
    requests, expected = alone
    tokens, found = generate(pair, "fixed:3", requests, num_branches=2)
    assert tokens == expected
    assert found["num_branch_rows"] > 0


@pytest.mark.slow
def test_a_mixture_drafts_for_a_mixture(tmp_path: Path) -> None:
    """Steps of the draft's loop choose experts anew."""
    folder = tmp_path / "checkpoints"
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 300}
    make_moe_checkpoint(folder / "target", num_layers=2, **sizes)
    make_moe_checkpoint(folder / "draft", num_layers=1, **sizes)
    engines, requests = build_moe_pair(tmp_path, exit_layers=(1,)), mixed_requests(False)
    expected, _ = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)
    tokens, found = generate(engines, "erratic", requests)
    assert tokens == expected
    assert found["num_accepted_tokens"] > 0


def test_the_file_has_the_experts_on_top_of_each_other(pair: EngineDir) -> None:
    with (
        CudaFile.open(pair.target_path) as file,
        CheckpointWeights(pair.path.parent / "checkpoints" / "target") as weights,
    ):
        layer = load_weights(file, torch.device("cpu")).layers[1]
        for name, stacked in (("gate_up", layer.gate_up), ("down", layer.down)):
            parts = ("gate", "up") if name == "gate_up" else ("down",)
            for index in range(NUM_EXPERTS):
                source = f"model.layers.1.mlp.experts.{index}"
                rows = [weights.float32(f"{source}.{part}_proj.weight", (64, 64)) for part in parts]
                np.testing.assert_array_equal(stacked[index].float().numpy(), np.concatenate(rows))


def test_weights_are_counted_to_the_byte(pair: EngineDir) -> None:
    assert_weights_are_counted(pair)


def assert_weights_are_counted(pair: EngineDir) -> None:
    """The count includes all that is loaded, but rope_inv_freq instead of the two tables made from it; sinks are fp32
    on the device."""
    with CudaFile.open(pair.target_path) as file:
        loaded, sizes = load_weights(file, torch.device("cpu")).num_bytes, file.model
    rotations = 2 * 4 * sizes["max_seq_len"] * sizes["head_dim"] // 2 - 4 * sizes["head_dim"] // 2
    sinks = 2 * sizes["num_layers"] * sizes["num_heads"] if sizes.get("has_sinks") else 0
    assert weight_bytes(pair.target_path, Quantization.NONE) == loaded - rotations - sinks


def test_what_mixtures_cannot_do_is_refused(pair: EngineDir) -> None:
    request = OpenRequest(pair, pair.build_config, 16, drafting=True)
    message = r"quantization is fp8, but .* has a mixture of experts, whose grouped"
    with ExitStack() as stack, pytest.raises(ConfigError, match=message):
        open_cuda_engines(replace(request, quantization=Quantization.FP8), HostGpu(), stack)


def test_memory_holds_the_rows_of_the_experts(pair: EngineDir) -> None:
    """The largest pass's pairs: rows of hidden_size gathered and multiplied, gate and up, and what follows of them."""
    limits = replace(pair.build_config, max_num_tokens=128)
    assert expert_buffers(OpenRequest(pair, limits, 4, drafting=True)) == {
        "rows of the target's experts": 128 * TOP_K * (2 * 64 + 3 * 64) * 2
    }


REFUSED = {
    "fp16": ({}, {"dtype": "float16"}, "dtype is float16, but the target is a mixture of experts, whose grouped"),
    "a width": (
        {"expert_size": 36},
        {},
        "an expert's intermediate_size is 36, of which grouped products need a multiple",
    ),
    "experts": ({"num_experts": 520}, {}, "with 520 experts in a layer; the CUDA kernels support at most 512"),
    "ranks": ({}, {"tp_size": 2}, "tp_size is 2, but the target is a mixture of experts, which one GPU holds whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_built_is_refused(name: str, tmp_path: Path) -> None:
    model, options, message = REFUSED[name]
    checkpoint = make_moe_checkpoint(tmp_path / "t", **({"num_layers": 1, "head_dim": 64} | model))
    with pytest.raises(InvalidArgumentError, match=message):
        build_engines(BuildOptions(checkpoint, None, tmp_path / "e", backend="cuda", max_seq_len=64, **options))


def test_an_mtp_layer_that_is_a_mixture_is_refused(tmp_path: Path) -> None:
    path = make_moe_checkpoint(tmp_path / "t", num_layers=1, head_dim=64, num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    layer, own = "model.layers.0.mlp.", "model.mtp_layers.0.mlp."
    tensors |= {name.replace(layer, own): values.clone() for name, values in tensors.items() if name.startswith(layer)}
    save_file(tensors, path / "model.safetensors")
    options = BuildOptions(path, None, tmp_path / "e", backend="cuda", dtype="bfloat16", max_seq_len=64, mtp=True)
    with pytest.raises(InvalidArgumentError, match="whose layers are mixtures of experts, which --backend"):
        build_engines(options)


def test_tensorrt_refuses_a_mixture(tmp_path: Path) -> None:
    load_trt()
    checkpoint = make_moe_checkpoint(tmp_path / "t", num_layers=1, head_dim=64)
    options = BuildOptions(checkpoint, None, tmp_path / "e", backend="tensorrt_rtx", dtype="float32", max_seq_len=64)
    with pytest.raises(
        InvalidArgumentError, match="the target is a mixture of experts, for which TensorRT has a layer"
    ):
        build_engines(options)
