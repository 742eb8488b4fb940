"""The whole executor over cuda engines on the host: greedy and seeded tokens bit for bit those without speculation."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from scipy import stats

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import ExecutorConfig, Quantization
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cuda import CudaEngine
from faser_trtllm.engine.cuda_accept import DeviceAcceptor
from faser_trtllm.engine.cuda_draft import DraftLaws
from faser_trtllm.engine.cuda_limits import CudaLimits
from faser_trtllm.engine.cuda_ops import KernelOps
from faser_trtllm.engine.cuda_runtime import HostRuntime
from faser_trtllm.engine.cuda_weights import DeviceWeights, LayerWeights
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.cuda_engines import open_cuda_engines
from faser_trtllm.executor.factory import assemble, open_executor
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair
from faser_trtllm.policy.fixed import FixedPolicy
from faser_trtllm.policy.off import OffPolicy
from faser_trtllm.policy.registry import make_policy
from tests.engine.cuda_exact_ops import ExactOps
from tests.engine.cuda_harness import build_pair, emulated_accept, one_thread  # noqa: F401
from tests.engine.harness import Harness
from tests.executor.harness import Collector, ErraticPolicy, toy_costs

MAX_BATCH_SIZE = 4
MAX_DRAFT_LEN = 4
POLICIES = [
    "fixed:1",
    "fixed:4",
    "fixed:3:draft_ahead",
    "fixed:3:ping_pong",
    "erratic",
    "price:prune=on",
    "price:mode=draft_ahead",
    "price:mode=ping_pong,prune=on",
]


class HostGpu:
    """Partitions that are names, and exact arithmetic."""

    whole = GpuPartition("whole", 1, 132)
    pair = PartitionPair(GpuPartition("draft", 2, 32), GpuPartition("target", 3, 100))

    def make_runtime(self):
        return HostRuntime()

    def load_weights(self, file, runtime, quantization):
        return DeviceWeights.load(file, runtime.device, torch.float32, quantization)

    def free_bytes(self):
        return 1 << 40

    def make_ops(self, runtime, head_dim):
        return ExactOps()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300, hidden_size=32)


def make(policy: str):
    if policy == "off":
        return OffPolicy()
    if policy == "erratic":
        return ErraticPolicy(MAX_DRAFT_LEN, 0)
    if policy.startswith("fixed"):
        _, length, *mode = policy.split(":")
        return FixedPolicy(int(length), Mode(mode[0]) if mode else Mode.SERIAL)
    return make_policy(policy, MAX_DRAFT_LEN, toy_costs(), MAX_BATCH_SIZE)


class KernelAcceptGpu(HostGpu):
    """The free test and the draws by the kernels, emulated."""

    def make_ops(self, runtime, head_dim):
        ops = ExactOps()
        ops.accept = KernelOps({"accept": emulated_accept()}, lambda: 0, num_sms=4).accept
        return ops


def generate(
    engines: EngineDir,
    policy: str,
    requests,
    gpu=None,
    max_batch_size=MAX_BATCH_SIZE,
    max_num_tokens=32,
    num_blocks=24,
    quantization=Quantization.NONE,
    **config,
):
    """-> tokens by request, and the executor's statistics."""
    drafting = policy != "off"
    limits = BuildConfig(max_batch_size, max_num_tokens, 128, MAX_DRAFT_LEN if drafting else 0, 32)
    clock, collector = ManualClock(), Collector()
    with ExitStack() as stack:
        opened = open_cuda_engines(engines, limits, num_blocks, drafting, gpu or HostGpu(), stack, quantization)
        executor = assemble(
            opened.target,
            opened.draft,
            make(policy),
            ExecutorConfig(max_queue_size=10_000, **config),
            max_seq_len=128,
            max_draft_len=limits.max_draft_len,
            clock=clock,
            resources=stack.pop_all(),
            enter_mode=opened.enter_mode,
            device_tester=opened.tester,
        )
        with executor:
            for index, (prompt, params) in enumerate(requests):
                executor.submit(str(index), prompt, params, collector.sink(str(index)))
            while executor.step():
                clock.advance(0.001)
            executor.check_integrity()
            found = executor.stats()
    return [collector.tokens[str(i)] for i in range(len(requests))], found


def mixed_requests(has_edits: bool):
    """Greedy and seeded in turn. Edited logits are drafted on the host, others on the device."""
    rng = np.random.default_rng(3)
    requests = []
    for index in range(7):
        prompt = rng.integers(0, 300, 3 + 9 * index).tolist()
        seed = None if index % 2 == 0 else 1000 + index
        params = SamplingParams(
            max_tokens=12 + index,
            temperature=0.0 if seed is None else 0.7,
            seed=seed,
            top_p=0.9 if index == 3 else None,
            repetition_penalty=1.2 if has_edits and index == 5 else 1.0,
            bad_words=((5, 6), (7,)) if has_edits and index == 4 else (),
            logit_bias=((8, 1.5), (9, -2.0)) if has_edits and index == 3 else (),
            end_ids=(2,),
            min_tokens=3 if has_edits and index == 2 else 0,
        )
        requests.append((prompt, params))
    return requests


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "edited"])
def alone(request: pytest.FixtureRequest, engines: EngineDir):
    """Requests, and their tokens without speculation, one request at a time."""
    requests = mixed_requests(request.param)
    return requests, generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)[0]


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


def test_histories_longer_than_the_first_upload_buffer(engines: EngineDir) -> None:
    rng = np.random.default_rng(4)
    params = SamplingParams(max_tokens=10, temperature=0.0, repetition_penalty=1.3)
    requests = [(rng.integers(0, 300, 105).tolist(), params) for _ in range(4)]
    expected, _ = generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)
    tokens, _ = generate(engines, "fixed:2", requests)
    assert tokens == expected


def test_requests_that_wait_for_blocks_keep_their_text(engines: EngineDir, alone) -> None:
    """Blocks for two requests at a time: others wait, and are drafted and verified in other slots than alone."""
    requests, expected = alone
    tokens, _ = generate(engines, "fixed:4", requests, num_blocks=8)
    assert tokens == expected


def test_unseeded_sampling_has_the_targets_law() -> None:
    """Chi-square over all continuations of two tokens, drafts drawn and tested on the device's code."""
    torch.manual_seed(5)
    keys = np.random.default_rng(11)
    vocab_size, num_requests, prompt = 3, 700, [1, 2, 0]
    target, draft = (random_weights(vocab_size, seed) for seed in (0, 1))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("os.urandom", lambda n: keys.bytes(n))
        laws = DraftLaws(HostRuntime(), 32, 3, vocab_size)
        target_engine = open_weights(target, stack, keep_logits=True)
        draft_engine = open_weights(draft, stack, laws=laws, max_draft_len=3)
        tester = DeviceAcceptor(target_engine, ExactOps(), 3, laws)
        clock, collector = ManualClock(), Collector()
        executor = assemble(
            target_engine,
            draft_engine,
            ErraticPolicy(3, 0),
            ExecutorConfig(max_queue_size=10_000),
            max_seq_len=32,
            max_draft_len=3,
            clock=clock,
            device_tester=tester,
        )
        params = SamplingParams(max_tokens=3, temperature=1.2)
        for index in range(num_requests):
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        with executor:
            while executor.step():
                clock.advance(0.001)
            found = executor.stats()
        seen = Counter(tuple(tokens[:2]) for tokens in collector.tokens.values())
        law, wrong = (two_token_law(weights, stack, prompt, 1.2) for weights in (target, draft))
    assert 0 < found["num_accepted_tokens"] < found["num_draft_tokens"], "both outcomes of the test are exercised"
    observed = [seen[c] for c in sorted(law)]
    assert stats.chisquare(observed, [law[c] * num_requests for c in sorted(law)]).pvalue > 0.01
    assert stats.chisquare(observed, [wrong[c] * num_requests for c in sorted(law)]).pvalue < 1e-6


def random_weights(vocab_size: int, seed: int) -> DeviceWeights:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    sizes |= {"intermediate_size": 16, "vocab_size": vocab_size, "max_seq_len": 32, "sliding_window": 0}
    sizes |= {"rms_norm_eps": 1e-5}

    def matrix(num_out, num_in):
        return torch.randn(num_out, num_in, generator=generator) / num_in**0.5

    layers = tuple(
        LayerWeights(torch.ones(16), matrix(48, 16), matrix(16, 16), torch.ones(16), matrix(32, 16), matrix(16, 16))
        for _ in range(2)
    )
    angles = torch.outer(torch.arange(32.0), 100.0 ** -(torch.arange(8) / 8))
    head = matrix(vocab_size, 16)
    return DeviceWeights(sizes, head * 4, layers, torch.ones(16), head, angles.cos(), angles.sin())


def open_weights(weights: DeviceWeights, stack: ExitStack, **options) -> CudaEngine:
    limits = CudaLimits(64, 16, 32, 160, 32, 160, options.pop("max_draft_len", 0))
    whole = HostGpu.whole
    return stack.enter_context(CudaEngine(weights, (0, 1, 2), ExactOps(), HostRuntime(), whole, limits, **options))


def two_token_law(weights: DeviceWeights, stack: ExitStack, prompt: list[int], temperature: float):
    harness = Harness(open_weights(weights, stack))

    def law_behind(tokens):
        logits = harness.run([(0, tokens, 0, len(tokens))])[0][-1].astype(np.float64) / temperature
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    first = law_behind(prompt)
    return {(a, b): first[a] * law_behind([*prompt, a])[b] for a in range(3) for b in range(3)}


def test_without_a_gpu_a_cuda_directory_is_refused_in_one_sentence(engines: EngineDir) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError) as error:
        open_executor(engines.path, ExecutorConfig())
    assert "finds no CUDA GPU, and the cuda backend needs one; install a CUDA build of torch" in str(error.value)


def test_modes_move_the_engines_to_the_sides_of_one_pair(engines: EngineDir) -> None:
    with ExitStack() as stack:
        limits = BuildConfig(2, 16, 64, 2, 32)
        opened = open_cuda_engines(engines, limits, 4, True, HostGpu(), stack)
        used = []
        for mode in (Mode.SERIAL, Mode.DRAFT_AHEAD, Mode.PING_PONG, Mode.SERIAL):
            opened.enter_mode(mode)
            used.append((opened.target.partition.name, opened.draft.partition.name))
    assert used == [("whole", "whole"), ("target", "draft"), ("target", "draft"), ("whole", "whole")]
