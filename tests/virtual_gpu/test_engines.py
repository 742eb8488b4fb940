"""The cuda backend on the virtual GPU: its own kernels, graphs and streams; speculation changes no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import KvCacheDtype
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.ops.cuda.driver import free_bytes
from tests.engine.cuda.harness import build_pair
from tests.support.effort import ONLY_ALL, pick
from tests.support.executor_harness import Collector
from tests.virtual_gpu.generation import generate_cuda
from tests.virtual_gpu.plan_engines import generate_requests
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

DRAFT, TARGET = "0+32", "32+100"
POLICIES = [*pick([], ["price:mode=draft_ahead", "fixed:3:draft_ahead", "price:prune=on"]), "erratic"]
EDITS = {
    "repetition_penalty": 1.2,
    "bad_words": ((5, 6), (7,)),
    "logit_bias": ((8, 1.5), (9, -2.0)),
    "min_tokens": 3,
    "top_p": 0.9,
}


def _request(number: int, **edits: Any) -> tuple[list[int], SamplingParams]:
    """Greedy or seeded in turn. Prompts always fit attention's narrow tile: the wide one's sums differ in the last
    bit."""
    drawn = {"temperature": 0.7, "seed": number} if number % 2 else {"temperature": 0.0}
    prompt = [7 * number + place for place in range(2 + number)]
    return prompt, SamplingParams(max_tokens=pick(6, 10) + number, end_ids=(2,), **drawn, **edits)


# The first four fill the batch, the others come as they end.
REQUESTS = [*map(_request, range(4)), _request(4, **EDITS), _request(5, **EDITS)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300)


@pytest.fixture(scope="module")
def alone(gpu: VirtualGpuProcess, engines: EngineDir) -> list[list[int]]:
    found = gpu.run(generate_cuda, engines, "off", REQUESTS)
    assert set(found.counters.work) == {"whole"}
    return found.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_changes_no_token(
    gpu: VirtualGpuProcess, engines: EngineDir, alone: list[list[int]], policy: str
) -> None:
    """In bf16, in a random order of work. Modes that overlap run on the two sides of one split."""
    found = gpu.run(generate_cuda, engines, policy, REQUESTS, seed=POLICIES.index(policy))
    assert found.tokens == alone
    both = (found.counters.kernels(DRAFT), found.counters.kernels(TARGET))
    assert "sample_rows" not in both[1], "drafts are drawn on the draft's side"
    if not policy.startswith("price"):  # which chooses the mode itself
        assert "sample_rows" in both[0]
    if policy == "erratic":
        assert found.stats["num_pruned_rows"] > 0
        assert {"prune_rows", "compact_rows"} <= both[1].keys() | found.counters.kernels("whole").keys()
        assert min(found.stats[f"num_steps_{mode}"] for mode in ("serial", "draft_ahead", "ping_pong")) > 0


def test_lanes_on_plain_streams_change_no_token(
    gpu: VirtualGpuProcess, engines: EngineDir, alone: list[list[int]]
) -> None:
    """In every mode, with rows pruned, in a random order of work; both lanes have every SM."""
    limits = {"max_batch_size": 4, "max_num_tokens": 32}
    found = gpu.run(generate_requests, engines.path, "erratic", REQUESTS, seed=1, gpu_partitions="streams", **limits)
    assert found.tokens == alone
    assert set(found.counters.work) == {"whole"}
    assert found.stats["num_pruned_rows"] > 0
    assert min(found.stats[f"num_steps_{mode}"] for mode in ("serial", "draft_ahead", "ping_pong")) > 0


# Short prompts again; their outputs repeat themselves.
REPEATING = [
    ([5 + number, 9] * 3, replace(params, max_tokens=pick(12, 24), top_p=0.05 if params.seed else None))
    for number, (_, params) in enumerate(REQUESTS)
]


@pytest.fixture(scope="module")
def repeating_alone(gpu: VirtualGpuProcess, engines: EngineDir) -> list[list[int]]:
    return gpu.run(generate_cuda, engines, "off", REPEATING).tokens


@pytest.mark.parametrize("drafters", ["suffix", "suffix,model"])
@pytest.mark.parametrize("policy", [*pick([], ["fixed:3:ping_pong", "price:prune=on"]), "erratic"])
def test_drafts_of_the_text_change_no_token(
    gpu: VirtualGpuProcess, engines: EngineDir, repeating_alone: list[list[int]], policy: str, drafters: str
) -> None:
    found = gpu.run(generate_cuda, engines, policy, REPEATING, drafters=drafters)
    assert found.tokens == repeating_alone
    names = drafters.split(",")
    passed = [found.stats[f"num_passed_drafts_{name}"] for name in names]
    assert sum(passed) == found.stats["num_accepted_tokens"]
    assert passed[0] > 0
    assert ("sample_rows" in found.counters.kernels(DRAFT) | found.counters.kernels("whole")) == ("model" in names)


def _generate_logged(engines: EngineDir, policy: str, requests: Any) -> tuple[list[list[int]], list[Any]]:
    collector = Collector()
    found = generate_cuda(engines, policy, requests, collector=collector)
    logged = [collector.requests[str(index)] for index in range(len(requests))]
    return found.tokens, [(request.context_log_probs, request.context_tops) for request in logged]


def test_log_probs_of_prompts_say_what_was_generated_greedily(
    gpu: VirtualGpuProcess, engines: EngineDir, alone: list[list[int]]
) -> None:
    """Prompts in graphs beside a request that decodes; log probs and the best tokens are made on the device."""
    asks = SamplingParams(max_tokens=1, return_context_log_probs=True, num_top_log_probs=3, end_ids=())
    prompts, texts = zip(
        *[(REQUESTS[number][0], [*REQUESTS[number][0], *alone[number]]) for number in (0, 2)], strict=True
    )
    requests = [REQUESTS[1], *((text, asks) for text in texts)]
    tokens, logged = gpu.run(_generate_logged, engines, "fixed:3:draft_ahead", requests)
    assert tokens[0] == alone[1]
    for prompt, text, (log_probs, tops) in zip(prompts, texts, logged[1:], strict=True):
        assert len(log_probs) == len(tops) == len(text) - 1
        for log_prob, token, (ids, logs) in list(zip(log_probs, text[1:], tops, strict=True))[len(prompt) - 1 :]:
            assert (token, log_prob) == (ids[0], logs[0])
            assert logs.tolist() == sorted(logs, reverse=True)


@ONLY_ALL
def test_long_contexts_are_split_and_change_no_token(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    """A context of two chunks among short ones: in captured passes, and with rows pruned in between."""
    sizes = {"max_seq_len": 1024, "max_position_embeddings": 1024, "num_layers": 2, "vocab_size": 300}
    engines = build_pair(tmp_path, exit_layers=(1,), **sizes)
    long = [3 + place % 290 for place in range(770)], SamplingParams(max_tokens=60, end_ids=(2,))
    requests = [long, _request(1), _request(2)]
    limits = {"max_seq_len": 1024, "num_blocks": 64, "max_num_tokens": 96}
    alone, pruned = (gpu.run(generate_cuda, engines, policy, requests, **limits) for policy in ("off", "erratic"))
    assert pruned.tokens == alone.tokens
    assert pruned.stats["num_pruned_rows"] > 0


@pytest.mark.parametrize("policy", ["price:prune=on", *pick([], ["erratic"])])
def test_speculation_changes_no_token_over_fp8_caches(gpu: VirtualGpuProcess, engines: EngineDir, policy: str) -> None:
    alone = gpu.run(generate_cuda, engines, "off", REQUESTS, kv_dtype=KvCacheDtype.FP8)
    found = gpu.run(generate_cuda, engines, policy, REQUESTS, kv_dtype=KvCacheDtype.FP8)
    assert found.tokens == alone.tokens
    assert "append_kv_normed_bf16_e4m3" in alone.counters.kernels("whole")


def test_speculation_changes_no_token_of_a_deterministic_target(gpu: VirtualGpuProcess, engines: EngineDir) -> None:
    """Prompts that fit no narrow tile are included; drafts go on with torch's products."""
    requests = [(prompt * 3, params) for prompt, params in REQUESTS[:4]]
    alone, found = (gpu.run(generate_cuda, engines, way, requests, deterministic=True) for way in ("off", "erratic"))
    assert found.tokens == alone.tokens
    assert found.stats["num_accepted_tokens"] > 0
    work = alone.counters.work["whole"]
    assert {
        "kernel matmul_bf16_m16",
        "kernel matmul_bf16_fp32_m16",
        "kernel verify_attention_bf16_h64_m64",
    } <= work.keys()
    assert not any("mm." in label or "attention_bf16_h64_m16" in label for label in work)


def _generate_on_a_full_gpu(engines: EngineDir, requests: Any) -> list[list[int]]:
    """Generate while all but 192 KiB of the memory is taken after the first step."""
    held: list[torch.Tensor] = []

    def fill(executor: Any, step: int) -> None:
        if step == 1:
            held.append(torch.empty(free_bytes() - (192 << 10), dtype=torch.uint8, device="privateuseone"))

    try:
        return generate_cuda(engines, "fixed:4", requests, on_step=fill).tokens
    finally:
        held.clear()


def test_the_first_edits_need_no_more_memory(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    """The batch is full when the memory is; those with edits come after it. Their scratch is 1.3 MB."""
    engines = build_pair(tmp_path, vocab_size=16384, max_seq_len=128)
    greedy = SamplingParams(max_tokens=2, temperature=0.0, end_ids=())
    edited = replace(greedy, repetition_penalty=1.2, max_tokens=6)
    requests = [([1 + number, 2, 3], edited if number > 3 else greedy) for number in range(8)]
    tokens = gpu.run(_generate_on_a_full_gpu, engines, requests)
    assert [len(text) for text in tokens] == [2] * 4 + [6] * 4
