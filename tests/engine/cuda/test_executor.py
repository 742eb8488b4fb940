"""The whole executor over cuda engines on the host: greedy and seeded tokens bit for bit those without speculation."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm import native
from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import DrafterName, ExecutorConfig
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cuda.engine import make_engine
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.cuda.weights import DeviceWeights, LayerWeights
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.sampler.accept import GpuRejectionSampler
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.engine.opening import OpenRequest, stay
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import assemble, open_executor
from faser_trtllm.policy.static import FixedPolicy
from faser_trtllm.sampling.table import SamplingTable
from lab.clock import ManualClock
from lab.reference.probs import next_token_probs_reference
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.host_executor import MAX_DRAFT_LEN, HostGpu, KernelAcceptGpu, generate, mixed_requests
from tests.support.doubtful import doubtful_drafts
from tests.support.effort import pick
from tests.support.engine_harness import Harness
from tests.support.executor_harness import Collector, ErraticPolicy
from tests.support.toy_guide import ToyGuide

pytestmark = pytest.mark.slow

POLICIES = [
    *pick([], ["fixed:1", "price:prune=on", "price:mode=draft_ahead", "fixed:4", "fixed:3:ping_pong"]),
    "fixed:3:draft_ahead",
    "erratic",
    "price:mode=ping_pong,prune=on",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_on_the_device_changes_nothing(engines: EngineDir, alone, policy: str) -> None:
    requests, expected = alone
    tokens, found = generate(engines, policy, requests)
    assert tokens == expected
    assert found["num_accepted_tokens"] > 0 or policy.startswith("price")
    for mode in ("draft_ahead", "ping_pong"):
        if policy in (f"fixed:3:{mode}", "erratic"):
            assert found[f"num_steps_{mode}"] > 0
    if policy == "erratic":
        assert found["num_pruned_rows"] > 0


def test_synthetic_acceptance_takes_its_rows_on_the_device(engines: EngineDir, alone) -> None:
    """Where no draft is accepted the text is the target's; else the mean is the one asked for."""
    requests, expected = alone
    tokens, found = generate(engines, "fixed:3", requests, synthetic_acceptance=0.0)
    assert tokens == expected
    assert found["num_accepted_tokens"] == 0
    _, found = generate(engines, "fixed:4", requests, synthetic_acceptance=2.0)
    assert found["num_accepted_tokens"] == pytest.approx(
        2 * found["num_drafts"], abs=12
    )  # the last of a request is cut


def test_the_accept_kernel_itself_gives_the_same_tokens(engines: EngineDir, alone) -> None:
    """Entries, lists and tokens are packed for the kernels' own pointers: penalties, bias, bad words, least tokens."""
    requests, expected = alone
    tokens, found = generate(engines, "fixed:3", requests, KernelAcceptGpu())
    assert tokens == expected
    assert found["num_accepted_tokens"] > 0


@pytest.mark.parametrize("gpu", [*pick([], [HostGpu]), KernelAcceptGpu])
def test_guided_requests_get_allowed_tokens_whatever_is_drafted(engines: EngineDir, gpu) -> None:
    """Masks are written and sent for the test alone; drafts that break the grammar are rejected."""
    requests = mixed_requests(True)
    guides = [ToyGuide.random(320, seed, 2) if seed % 3 else None for seed in range(len(requests))]
    guided = [(prompt, replace(params, guide=g)) for (prompt, params), g in zip(requests, guides, strict=True)]
    expected, _ = generate(engines, "off", guided, gpu(), max_batch_size=1, max_num_tokens=128)
    tokens, found = generate(engines, "fixed:3", guided, gpu())
    assert tokens == expected
    assert found["num_accepted_tokens"] > 0
    unguided, _ = generate(engines, "off", requests, gpu(), max_batch_size=1, max_num_tokens=128)
    for text, plain, guide in zip(tokens, unguided, guides, strict=True):
        if guide is None:
            assert text == plain
            continue
        assert text != plain
        for place, token in enumerate(text):
            assert token in guide.allowed(text[:place], (2,))


@pytest.mark.parametrize(
    ("normalized", "edited"), [(False, True), (True, False), *pick([], [(False, False), (True, True)])]
)
def test_log_probs_are_the_host_s(engines: EngineDir, normalized: bool, edited: bool) -> None:
    """Against logits that are copied to the host and filtered there, with and without speculation."""
    fields = {"return_log_probs": True, "normalize_log_probs": normalized, "return_generation_logits": True}
    seeded = [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1, "temperature": 1.5}]
    requests = [
        (prompt, replace(params, **(seeded[index // 2] if params.seed else {}), **fields))
        for index, (prompt, params) in enumerate(mixed_requests(edited))
    ]
    for policy in ("off", "fixed:3"):
        collector = Collector()
        generate(engines, policy, requests, collector=collector)
        for index, (prompt, params) in enumerate(requests):
            request = collector.requests[str(index)]
            table = SamplingTable(1, 320, MAX_DRAFT_LEN)
            known = [*prompt, *collector.tokens[str(index)]]
            twin = Request("twin", prompt, params, max_seq_len=128, max_draft_len=MAX_DRAFT_LEN, arrival_s=0.0)
            twin.tokens[: len(known)] = known
            table.bind(0, twin)
            if not normalized:
                table.array["mode"], table.array["temperature"] = native.SEEDED, params.temperature or 1.0
                table.array["top_k"], table.array["top_p"], table.array["min_p"] = 0, 1.0, 0.0
            for place, row in enumerate(request.output_logits):
                probs = np.empty(320, np.float32)
                next_token_probs_reference(table.array, 0, row, len(prompt) + place, probs)
                expected = np.log(probs[known[len(prompt) + place]])
                assert request.output_log_probs[place] == pytest.approx(expected, abs=1e-4)
            assert len(request.output_log_probs) == len(request.output_logits) > 0


def test_log_probs_do_not_depend_on_who_else_has_edits(engines: EngineDir) -> None:
    """The host computes log probs of edited rows; their last bits differ from the device's."""
    fields = {"return_log_probs": True, "num_top_log_probs": 2, "end_ids": ()}
    edits = {"repetition_penalty": 1.3, "logit_bias": ((8, 1.5),)}
    requests = [
        ([5 + number] * 4, SamplingParams(max_tokens=12, **fields, **(edits if number % 2 else {})))
        for number in range(4)
    ]
    together = Collector()
    generate(engines, "fixed:3", requests, collector=together)
    for number, request in enumerate(requests):
        alone = Collector()
        generate(engines, "off", [request], collector=alone)
        one, other = together.requests[str(number)], alone.requests["0"]
        assert one.output_log_probs == other.output_log_probs
        for (ids, logs), (same_ids, same_logs) in zip(one.output_tops, other.output_tops, strict=True):
            assert (ids.tolist(), logs.tolist()) == (same_ids.tolist(), same_logs.tolist())


@pytest.mark.parametrize("policy", ["off", *pick([], ["fixed:3"]), "erratic"])
def test_prompts_are_logged_by_the_rows_of_logits_that_a_pass_has(engines: EngineDir, policy: str) -> None:
    """Beside requests that want none, and one that wants its rows' logits; against log probs made on the host of the
    logits of generated tokens."""
    fields = {"return_log_probs": True, "num_top_log_probs": 4}
    requests = [(prompt, replace(params, end_ids=())) for prompt, params in mixed_requests(False)]
    requests[0] = (requests[0][0], replace(requests[0][1], max_tokens=50, return_generation_logits=True, **fields))
    collector = Collector()
    generate(engines, "off", requests, collector=collector)
    first = collector.requests["0"]
    text = [*requests[0][0], *collector.tokens["0"]]
    context = SamplingParams(max_tokens=3, return_context_log_probs=True, **fields)
    again = Collector()
    tokens, _ = generate(engines, policy, [(text, context), *requests], collector=again)
    assert tokens[1:] == [collector.tokens[str(index)] for index in range(len(requests))]
    assert np.array_equal(again.requests["1"].output_logits, first.output_logits)
    sent, known = again.requests["0"], len(requests[0][0]) - 1
    assert sent.context_log_probs[known:] == first.output_log_probs
    for (ids, logs), (same_ids, same_logs), row in zip(
        sent.context_tops[known:], first.output_tops, first.output_logits, strict=True
    ):
        assert ids.tolist() == same_ids.tolist() == np.argsort(-row)[:4].tolist()
        assert logs.tolist() == same_logs.tolist()
        exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert np.allclose(logs, exact[ids], rtol=0, atol=1e-5)


class MostSorted(TorchFunctionMode):
    """Counts the rows that are sorted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.sort:
            self.num_rows = max(self.num_rows, args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_memory_for_log_probs_does_not_grow_with_the_batch(engines: EngineDir) -> None:
    """A prompt may have the rows of logits of all requests, and each takes many times its own memory."""
    prompt = np.random.default_rng(4).integers(0, 300, 100).tolist()
    requests = [(prompt, SamplingParams(max_tokens=2, return_context_log_probs=True, num_top_log_probs=2))]
    few, many = Collector(), Collector()
    generate(engines, "off", requests, collector=few)
    with MostSorted() as most:
        generate(engines, "off", requests, collector=many, max_batch_size=96, max_num_tokens=96)
    assert 0 < most.num_rows <= 32
    one, other = many.requests["0"], few.requests["0"]
    assert one.context_log_probs == other.context_log_probs
    assert [ids.tolist() for ids, _ in one.context_tops] == [ids.tolist() for ids, _ in other.context_tops]


def test_histories_longer_than_the_first_upload_buffer(engines: EngineDir) -> None:
    rng = np.random.default_rng(4)
    params = SamplingParams(max_tokens=10, temperature=0.0, repetition_penalty=1.3)
    requests = [(rng.integers(0, 300, 105).tolist(), params) for _ in range(4)]
    expected, _ = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)
    tokens, _ = generate(engines, "fixed:2", requests)
    assert tokens == expected


@pytest.mark.parametrize(
    ("drafters", "num_branches"), [("suffix", 0), ("model", 2), *pick([], [("model", 0), ("suffix,model", 0)])]
)
def test_unseeded_sampling_has_the_targets_distribution(drafters: str, num_branches: int) -> None:
    """Chi-square over all continuations of three tokens, drafts drawn and tested on the device's code."""
    torch.manual_seed(5)
    keys = np.random.default_rng(11)
    vocab_size, num_requests, prompt = 3, 700, [1, 2, 0, 2, 1, 2, 0]
    temperature = 0.4 if num_branches else 1.2  # where what is said next hangs on what was said
    target, draft = (random_weights(vocab_size, seed) for seed in (0, 1))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, doubtful_drafts():
        patch.setattr("os.urandom", lambda n: keys.bytes(n))
        draft_probs = draft_engine = None
        limits = {"max_num_branches": 32 * num_branches}
        target_engine = open_weights(target, stack, **limits)
        if "model" in drafters:
            draft_probs = DeviceDraftProbs(HostRuntime(), HostGpu.whole, 32, 3, vocab_size)
            limits = {"max_draft_len": 3, "keeps_runners_up": num_branches > 0}
            draft_engine = open_weights(draft, stack, draft_probs=draft_probs, **limits)
        sampler = GpuRejectionSampler(target_engine, ExactOps(), 3, draft_probs)
        clock, collector = ManualClock(), Collector()
        executor = assemble(
            target_engine,
            draft_engine,
            FixedPolicy(3) if num_branches else ErraticPolicy(3, 0),  # whose other modes have chains
            ExecutorConfig(
                max_queue_size=10_000,
                drafters=tuple(map(DrafterName, drafters.split(","))),
                num_branches=num_branches,
            ),
            max_seq_len=32,
            max_draft_len=3,
            clock=clock,
            enter_mode=stay,
            sampler=sampler,
            copy_kv=target_engine.copy_kv,
        )
        params = SamplingParams(max_tokens=5, temperature=temperature)
        for index in range(num_requests):
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        with executor:
            while executor.step():
                clock.advance(0.001)
            found = executor.stats()
        seen = Counter(tuple(tokens[:3]) for tokens in collector.tokens.values())
        probs, wrong = (three_token_probs(weights, stack, prompt, temperature) for weights in (target, draft))
    for name in drafters.split(","):
        passed, tested = (found[f"num_{what}_drafts_{name}"] for what in ("passed", "tested"))
        assert 0 < passed < tested, "both outcomes of the test are exercised"
    assert (found["num_branch_tokens"] > 0) is (num_branches > 0)
    observed = [seen[c] for c in sorted(probs)]
    assert stats.chisquare(observed, [probs[c] * num_requests for c in sorted(probs)]).pvalue > 0.001
    assert stats.chisquare(observed, [wrong[c] * num_requests for c in sorted(probs)]).pvalue < 1e-6


def random_weights(vocab_size: int, seed: int) -> DeviceWeights:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    sizes |= {"intermediate_size": 16, "vocab_size": vocab_size, "max_seq_len": 32, "windows": [0, 0]}
    sizes |= {"rms_norm_eps": 1e-5}

    def matrix(num_out, num_in):
        return torch.randn(num_out, num_in, generator=generator) / num_in**0.5

    layers = tuple(LayerWeights(matrix(48, 16), matrix(16, 16), matrix(32, 16), matrix(16, 16)) for _ in range(2))
    angles = torch.outer(torch.arange(32.0), 100.0 ** -(torch.arange(8) / 8))
    head = matrix(vocab_size, 16)
    return DeviceWeights(sizes, head * 4, layers, torch.ones(16), head, angles.cos(), angles.sin())


def open_weights(weights: DeviceWeights, stack: ExitStack, **options) -> GpuEngine:
    names = ("max_draft_len", "max_num_branches", "keeps_runners_up")
    limits = GpuLimits(64, 16, 32, 160, 32, 160, **{name: options.pop(name) for name in names if name in options})
    place = Placement(ExactOps(), HostRuntime(), HostGpu.whole)
    return stack.enter_context(make_engine(weights, (0, 1, 2), place, limits, **options))


def three_token_probs(weights: DeviceWeights, stack: ExitStack, prompt: list[int], temperature: float):
    harness = Harness(open_weights(weights, stack))

    def probs_behind(tokens):
        logits = harness.run([(0, tokens, 0, len(tokens))])[0][-1].astype(np.float64) / temperature
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    found = {(): 1.0}
    for _ in range(3):
        found = {
            (*text, token): prob * behind
            for text, prob in found.items()
            for token, behind in enumerate(probs_behind([*prompt, *text]))
        }
    return found


def test_without_a_gpu_a_cuda_directory_is_refused_in_one_sentence(engines: EngineDir) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError) as error:
        open_executor(engines.path, ExecutorConfig())
    assert "finds no CUDA GPU, and GPU backends need one; install a CUDA build of torch" in str(error.value)


def test_modes_move_the_engines_to_the_sides_of_one_pair(engines: EngineDir) -> None:
    with ExitStack() as stack:
        limits = BuildConfig(2, 16, 64, 2, 32)
        opened = open_cuda_engines(OpenRequest(engines, limits, 4, drafting=True), HostGpu(), stack)
        used = []
        for mode in (Mode.SERIAL, Mode.DRAFT_AHEAD, Mode.PING_PONG, Mode.SERIAL):
            opened.enter_mode(mode)
            used.append((opened.target.partition.name, opened.draft.partition.name))
    assert used == [("whole", "whole"), ("target", "draft"), ("target", "draft"), ("whole", "whole")]
