"""Mixtures of experts on the virtual GPU: kernels emulated, groups and counts on the device, and no wait more."""

from __future__ import annotations

import functools
from itertools import accumulate
from operator import and_, eq
from pathlib import Path

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.factory import open_executor
from tests.engine.cuda.harness import build_moe_pair
from tests.support.effort import pick
from tests.support.executor_harness import Collector
from tests.virtual_gpu.generation import generate_cuda
from tests.virtual_gpu.launches import of_layer
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

TEST, COUNT = "engine/gpu/sampler/accept:sample", "engine/gpu/engine:_run"
POLICIES = [*pick([], ["fixed:3:draft_ahead", "price:prune=on"]), "erratic"]
REQUESTS = [
    (
        [7 * number + place for place in range(2 + number)],
        SamplingParams(
            max_tokens=pick(6, 10) + number,
            end_ids=(2,),
            temperature=0.7 * (number % 2),
            seed=number if number % 2 else None,
        ),
    )
    for number in range(5)
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_moe_pair(tmp_path_factory.mktemp("moe"), exit_layers=(1,), vocab_size=300, seed=1)


@pytest.fixture(scope="module")
def alone(hopper: VirtualGpuProcess, engines: EngineDir) -> list[list[int]]:
    found = hopper.run(generate_cuda, engines, "off", REQUESTS)
    assert {"route_rows_sort", "combine_rows"} <= found.counters.kernels("whole").keys()
    return found.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_changes_no_token(
    hopper: VirtualGpuProcess, engines: EngineDir, alone: list[list[int]], policy: str
) -> None:
    """In bf16, captured, in a random order of work."""
    found = hopper.run(generate_cuda, engines, policy, REQUESTS, seed=POLICIES.index(policy))
    assert found.tokens == alone
    if policy == "erratic":
        assert found.stats["num_pruned_rows"] > 0


@pytest.mark.parametrize("quantization", ["none", "mxfp4"])
def test_speculation_changes_no_token_of_gpt_oss(hopper: VirtualGpuProcess, tmp_path: Path, quantization: str) -> None:
    options = {"exit_layers": (1,), "vocab_size": 300, "head_dim": 64, "seed": 1, "quantization": quantization}
    engines = build_moe_pair(tmp_path, "gpt_oss", **options)
    alone = hopper.run(generate_cuda, engines, "off", REQUESTS)
    found = hopper.run(generate_cuda, engines, "erratic", REQUESTS, seed=3)
    assert found.tokens == alone.tokens
    assert found.stats["num_accepted_tokens"] > 0
    kernels = found.counters.kernels("whole").keys()
    assert {"verify_attention_sinks_bf16_h64_m16", "clamped_swiglu"} <= kernels
    assert ("grouped_matmul_mxfp4_m16" in kernels) == (quantization == "mxfp4")


def test_products_of_experts_are_ours_on_other_gpus(gpu: VirtualGpuProcess, engines: EngineDir) -> None:
    """Torch's would wait for the host there."""
    alone, found = (gpu.run(generate_cuda, engines, policy, REQUESTS) for policy in ("off", "erratic"))
    assert found.tokens == alone.tokens
    assert "grouped_matmul_m16" in found.counters.kernels("whole")


def test_a_deterministic_mixture_has_products_of_ours_alone(hopper: VirtualGpuProcess, engines: EngineDir) -> None:
    alone, found = (
        hopper.run(generate_cuda, engines, policy, REQUESTS, deterministic=True) for policy in ("off", "erratic")
    )
    assert found.tokens == alone.tokens
    assert {"grouped_matmul_m16", "matmul_bf16_m16"} <= found.counters.kernels("whole").keys()


def test_texts_are_nearly_those_of_the_cpu_engine(engines: EngineDir, alone: list[list[int]]) -> None:
    """Greedy. The CPU engine keeps the residual in fp32, so texts may part where two tokens or two experts nearly
    tie: most of the tokens come before."""
    collector, on_cpu = Collector(), build_moe_pair(engines.path.parent, backend="cpu")
    with open_executor(on_cpu.path, ExecutorConfig(speculation="off")) as executor:
        for number, (prompt, params) in enumerate(REQUESTS):
            executor.submit(str(number), prompt, params, collector.sink(str(number)))
        while executor.step():
            pass
    texts = [(found, collector.tokens[str(number)]) for number, found in enumerate(alone)][::2]
    same = [sum(accumulate(map(eq, *pair), and_)) for pair in texts]
    assert sum(same) > sum(len(found) for found, _ in texts) / 2
    assert any(found == wanted for found, wanted in texts)


def test_counts_of_experts_cost_no_wait(hopper: VirtualGpuProcess, engines: EngineDir) -> None:
    """A copy of one number a pass, before the wait for what was accepted."""
    found = hopper.run(generate_cuda, engines, "off", REQUESTS[:4])
    assert found.counters.reads().keys() == {TEST, COUNT}
    num_steps = found.stats["num_steps"]
    assert found.counters.reads()[COUNT] == (num_steps, 4 * num_steps)
    assert found.counters.waits[f"wait {TEST}"] == num_steps
    assert f"wait {COUNT}" not in found.counters.waits


def test_a_layer_s_launches(hopper: VirtualGpuProcess, tmp_path: Path) -> None:
    """Attention's two products and kernels; the norm, three kernels of routes, rows gathered, two grouped products,
    the activation, and the sum."""
    layer, _ = of_layer(hopper, tmp_path, build=build_moe_pair)
    kernels = ("append_kv_normed_bf16", "verify_attention_bf16_h64_m16", "gated_silu_bf16", "combine_rows")
    routes = ("route_rows_logits", "route_rows_choose", "route_rows_sort")
    products = {"aten.mm.default": 1, "aten.addmm_.default": 1, "aten._grouped_mm.default": 2}
    rest = {"aten.rms_norm": 1, "aten.index_select.default": 1}
    assert layer == {f"kernel {name}": 1 for name in (*kernels, *routes)} | products | rest


def test_a_layer_s_launches_of_gpt_oss(hopper: VirtualGpuProcess, tmp_path: Path) -> None:
    """One more than without biases, for that of attention's output: kernels add the others."""
    layer, _ = of_layer(hopper, tmp_path, build=functools.partial(build_moe_pair, family="gpt_oss"))
    kernels = ("append_kv_normed_bf16", "verify_attention_sinks_bf16_h64_m16", "clamped_swiglu", "combine_rows")
    routes = ("route_rows_logits", "route_rows_choose", "route_rows_sort")
    products = {"aten.mm.default": 1, "aten.addmm_.default": 1, "aten.add_.Tensor": 1, "aten._grouped_mm.default": 2}
    rest = {"aten.rms_norm": 1, "aten.index_select.default": 1}
    assert layer == {f"kernel {name}": 1 for name in (*kernels, *routes)} | products | rest
