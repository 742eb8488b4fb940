"""The EAGLE-3 head on the cuda engine: what its target keeps for it, and drafts whose laws are torch's."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cuda.engine import make_engine
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.open import open_cuda_draft, open_cuda_engines
from faser_trtllm.engine.cuda.weights import DeviceWeights
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.reference_ops import ReferenceOps
from faser_trtllm.engine.gpu.runtime import HostRuntime
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import WHOLE, build_with_head
from tests.engine.cuda.host_executor import HostGpu, generate, mixed_requests
from tests.support.eagle3 import TorchHead, make_head, torch_head
from tests.support.effort import pick
from tests.support.engine_harness import Harness

VOCAB, NUM_LAYERS, NUM_SLOTS, MAX_DRAFT_LEN, MAX_SEQ_LEN = 320, 4, 4, 5, 128
VARIANTS = {
    "safeailab": {"layers": (0, 1, 3)},
    "specforge": {"naming": "layers.0", "layers": (1, 2, 4), "own_embedding": False, "norm_before_residual": True},
    "whole_vocabulary": {"draft_vocab_size": None, "layers": (2,)},
}
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0)


@dataclass
class Pair:
    target: Harness
    draft: GpuEngine
    kept: HiddenRows
    torch_head: TorchHead
    reference: ReferenceModel
    layers: tuple[int, ...]

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden rows [n, layers * hidden], by torch."""
        rows = self.reference.hidden_rows(tokens)
        return torch.cat([rows[layer] for layer in self.layers], -1)

    def kept_rows(self, slot: int, count: int) -> torch.Tensor:
        """What the target kept of a slot's first tokens."""
        places = np.arange(count)
        blocks = self.target.block_table[slot, places // 32].astype(np.int64)
        return self.kept.tensor[torch.from_numpy(blocks * 32 + places % 32)]

    def laws(self, tokens: list[int], num_tokens: int, first: int) -> np.ndarray:
        """Distributions [.., vocab] behind tokens[:first], tokens[:first + 1] and so on, of which the target has run
        all but the last of num_tokens: beyond, the head goes on from its own outputs."""
        features = self.torch_head.features(self.hidden(tokens[: num_tokens - 1]))
        while True:
            outputs, logits = self.torch_head.forward(features, tokens[1 : len(features) + 1])
            if len(features) == len(tokens) - 1:
                return logits[first - 2 :].softmax(-1).numpy()
            features = torch.cat((features, outputs[-1:]))


def open_pair(engines: EngineDir, stack: ExitStack, dtype=torch.float32, ops=ExactOps) -> Pair:
    runtime, opened = HostRuntime(), []
    with CudaFile.open(engines.target_path) as file, CudaFile.open(engines.draft_path) as draft_file:
        layers, hidden = draft_file.model["head"]["layers"], file.model["hidden_size"]
        kept = HiddenRows(runtime, layers, hidden, dtype, num_blocks=4 * NUM_SLOTS, tokens_per_block=32)
        for each in (file, draft_file):
            weights = DeviceWeights.load(each, runtime.device, dtype)
            limits = GpuLimits(
                4 * NUM_SLOTS, 32, NUM_SLOTS, 128, MAX_SEQ_LEN, 128, 0 if each is file else MAX_DRAFT_LEN
            )
            engine = make_engine(weights, each.segments, ops(), runtime, WHOLE, limits, hidden_rows=kept)
            opened.append(stack.enter_context(engine))
    root = engines.path.parent
    weights = stack.enter_context(CheckpointWeights(root / "t"))
    reference = ReferenceModel(load_model_config(root / "t"), weights)
    head = torch_head(root / "h", root / "t")
    return Pair(Harness(opened[0]), opened[1], kept, head, reference, tuple(layers))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """In float32, with products summed in float64."""
    engines = build_with_head(
        tmp_path_factory.mktemp(request.param), make_head, exit_layers=(1, 3), **VARIANTS[request.param]
    )
    with ExitStack() as stack:
        yield open_pair(engines, stack)


def draft(pair: Pair, requests: list[tuple[list[int], int, int, int]], params: SamplingParams = SAMPLED):
    """requests: known tokens, of which so many are committed, of which the head has run so many, and drafts wanted ->
    per request its tokens with the drafts, and their q."""
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN, new_key=lambda: 7)
    bound = []
    for slot, (tokens, num_tokens, _, _) in enumerate(requests):
        request = Request(str(slot), tokens[:num_tokens], params, max_seq_len=64, max_draft_len=MAX_DRAFT_LEN)
        request.tokens[: len(tokens)] = tokens
        table.bind(slot, request)
        bound.append(request)
    batch = pair.target.batch([(slot, t, first, n) for slot, (t, n, first, _) in enumerate(requests)])
    counts = [(n, len(t) - n, wanted) for t, n, _, wanted in requests]
    num_tokens, num_drafts, num_new = (np.array(column, np.int32) for column in zip(*counts, strict=True))
    found = pair.draft.draft(DraftBatch(batch, table.array, num_tokens, num_drafts, num_new, MAX_DRAFT_LEN))
    assert found.tolist() == num_new.tolist()
    drafted = []
    for slot, (tokens, _, _, wanted) in enumerate(requests):
        end = len(tokens) + wanted
        places = [position % MAX_DRAFT_LEN for position in range(len(tokens), end)]
        drafted.append((bound[slot].tokens[:end].tolist(), table.draft_probs(slot)[places].copy()))
    return drafted


def random_tokens(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


def test_the_target_keeps_its_hidden_rows_of_named_layers(pair: Pair) -> None:
    """By whole passes, in chunks, and by segments between which rows are dropped."""
    first, second = random_tokens(1, 50, 40)
    pair.target.run([(0, first, 0, 33), (2, second, 0, 7)])
    pair.target.run([(2, second, 7, 40), (0, first, 33, 50)])
    for slot, tokens in ((0, first), (2, second)):
        torch.testing.assert_close(pair.kept_rows(slot, len(tokens)), pair.hidden(tokens), atol=2e-5, rtol=2e-5)
    before = pair.kept.tensor.clone()
    (third,) = random_tokens(2, 12)
    fourth = second[:5] + third
    engine, batch = pair.target.engine, pair.target.batch([(0, third, 0, 12), (2, fourth, 5, 9)])
    for segment in range(len(engine.spec.segments) - 1):
        engine.run_segment(batch, segment)
        if segment == 1:
            kept = np.r_[:9, 12:14].astype(np.int32)  # three rows of the first go, and two of the second
            engine.compact_rows(kept)
            batch = keep_rows(batch, kept, [9, 2])
    torch.testing.assert_close(pair.kept_rows(0, 9), pair.hidden(third[:9]), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pair.kept_rows(2, 7), pair.hidden(fourth[:7]), atol=2e-5, rtol=2e-5)
    others = np.setdiff1d(np.arange(16), np.r_[pair.target.block_table[0], pair.target.block_table[2]])
    places = torch.from_numpy(np.concatenate([np.arange(block * 32, block * 32 + 32) for block in others]))
    assert torch.equal(pair.kept.tensor[places], before[places]), "other requests' blocks are left alone"


def test_laws_of_drafts_match_torch(pair: Pair) -> None:
    """Requests at once: a prompt that is new, one of which rows are there, with pending drafts and without, and one
    that drafts nothing."""
    tokens = random_tokens(5, 9, 40, 17, 6)
    if pair.torch_head.config["draft_vocab_size"] < VOCAB:
        assert 0 < (pair.laws(tokens[0], 9, 9) == 0).sum() < VOCAB
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
    # of the second the first 35 are committed and 20 run, of the third all but two
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)])
    requests = [(tokens[0], 9, 0, 5), (tokens[1][:38], 35, 20, 2), (tokens[2], 15, 0, 3), (tokens[3], 6, 0, 0)]
    drafted = draft(pair, requests)
    for (known, num_tokens, _, wanted), (result, q) in zip(requests, drafted, strict=True):
        if wanted:
            np.testing.assert_allclose(q, pair.laws(result[:-1], num_tokens, len(known)), atol=2e-5)


def test_rows_of_pending_drafts_are_run_again_with_the_targets_rows(pair: Pair) -> None:
    (tokens,) = random_tokens(6, 12)
    pair.target.run([(0, tokens, 0, 11)])
    ((result, _),) = draft(pair, [(tokens, 12, 0, 4)])
    pair.target.run([(0, result, 11, 14)])
    ((longer, q),) = draft(pair, [(result[:14], 14, 12, 3)])
    np.testing.assert_allclose(q, pair.laws(longer[:-1], 14, 14), atol=2e-5)


def test_graphs_change_no_bit_and_hold_every_step(tmp_path: Path) -> None:
    """Pending drafts included: of a draft call only the first pass may be launched kernel by kernel."""
    engines = build_with_head(tmp_path, make_head, layers=(1, 2, 4))
    tokens = random_tokens(7, 9, 20, 17)
    requests = [(tokens[0], 9, 0, 3), (tokens[1], 18, 0, 2), (tokens[2], 16, 0, 4)]
    found = []
    for captures in (False, True):
        with ExitStack() as stack:
            pair = open_pair(engines, stack)
            if captures:
                pair.draft.capture_graphs([WHOLE])
            pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
            drafted = draft(pair, requests)
            found.append([(result, q.tobytes()) for result, q in drafted])
            assert (("step", 4, WHOLE.name) in pair.draft.graphs) is captures
    assert found[0] == found[1]


def test_bfloat16_stays_near_torch(tmp_path: Path) -> None:
    engines = build_with_head(tmp_path, make_head, layers=(0, 1, 3))
    tokens = random_tokens(8, 30, 21)
    with ExitStack() as stack:
        pair = open_pair(engines, stack, torch.bfloat16, ReferenceOps)
        pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
        requests = [(t, len(t), 0, 4) for t in tokens]
        for (known, num_tokens, _, _), (result, q) in zip(requests, draft(pair, requests), strict=True):
            wanted = pair.laws(result[:-1], num_tokens, len(known))
            assert np.array_equal(q == 0, wanted == 0)
            possible = wanted > 1e-4
            error = np.log(q[possible]) - np.log(wanted[possible])
            assert np.sqrt(np.square(error).mean()) < 0.03 * np.log(wanted[possible]).std()


def test_a_head_must_run_the_last_committed_row(pair: Pair) -> None:
    (tokens,) = random_tokens(9, 8)
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN)
    counts = [np.array([number], np.int32) for number in (7, 1, 2)]
    with pytest.raises(InvalidArgumentError, match="the row of its last committed token"):
        pair.draft.draft(DraftBatch(pair.target.batch([(0, tokens, 0, 8)]), table.array, *counts, MAX_DRAFT_LEN))


POLICIES = [
    *pick([], ["fixed:1", "price:prune=on"]),
    "fixed:4",
    "fixed:3:draft_ahead",
    "fixed:3:ping_pong",
    "erratic",
    "price:mode=ping_pong,prune=on",
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    root = tmp_path_factory.mktemp("pair")
    return build_with_head(root, make_head, exit_layers=(2,), layers=(1, 2, 4), draft_vocab_size=200)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "edited"])
def alone(request: pytest.FixtureRequest, engines: EngineDir):
    requests = mixed_requests(request.param)
    return requests, generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_is_the_targets_own(engines: EngineDir, alone, policy: str) -> None:
    requests, expected = alone
    tokens, found = generate(engines, policy, requests)
    assert tokens == expected
    assert found["num_drafts"] > 0 or policy.startswith("price")
    if policy == "erratic":
        assert found["num_pruned_rows"] > 0


def test_what_a_head_cannot_do_is_refused(engines: EngineDir) -> None:
    request, gpu = OpenRequest(engines, engines.build_config, 16, drafting=True), HostGpu()
    with ExitStack() as stack:
        with pytest.raises(ConfigError, match=r"quantization is fp8, but .* drafts with an EAGLE-3 head"):
            open_cuda_engines(replace(request, quantization=Quantization.FP8), gpu, stack)
        with pytest.raises(ConfigError, match="reads hidden rows of a target of ours"):
            open_cuda_draft(request, gpu, stack)


def test_hidden_rows_are_counted_with_the_kv(engines: EngineDir) -> None:
    """What a KV token takes: keys and values of all layers of both, and three hidden rows, of 2 bytes each."""
    num_values = (NUM_LAYERS + 1) * 2 * 2 * 64 + 3 * 64
    assert engines.kv_bytes_per_token() == 2 * num_values
