"""Medusa heads on the CPU engine: their drafts' laws are those of the published forward pass in torch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import EngineFileError, InvalidArgumentError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.sampling.table import SamplingTable
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_harness import Harness
from tests.support.medusa import TorchMedusa, make_medusa

VOCAB, NUM_SLOTS, MAX_DRAFT_LEN, MAX_SEQ_LEN = 320, 4, 5, 64
SIZES = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128, "max_draft_len": MAX_DRAFT_LEN}
VARIANTS = {
    "plain": ({}, {"num_heads": 4}),
    "deep": ({}, {"num_heads": 3, "num_layers": 2, "biases": False}),
    "odd_sizes": ({"hidden_size": 70, "num_heads": 5, "num_kv_heads": 1, "head_dim": 18}, {"num_heads": 5}),
}
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0)


@dataclass
class Pair:
    target: Harness
    draft: CpuEngine
    heads: TorchMedusa
    reference: ReferenceModel
    path: Path

    def laws(self, tokens: list[int], num_tokens: int) -> np.ndarray:
        """Distributions [heads, vocab] of the drafts behind tokens[:num_tokens]."""
        hidden = self.reference.hidden_rows(tokens[: num_tokens - 1])[-1][-1]
        return self.heads.logits(hidden).softmax(-1).numpy()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    root: Path = tmp_path_factory.mktemp(request.param)
    of_target, of_heads = VARIANTS[request.param]
    target_dir = make_checkpoint(root / "t", vocab_size=VOCAB, num_layers=3, **of_target)
    heads_dir = make_medusa(root / "h", target_dir, **of_heads)
    built = build_engines(BuildOptions(target_dir, heads_dir, root / "e", **SIZES))
    sizes = {"num_blocks": 16, "tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128}
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=2))
        target = stack.enter_context(CpuEngine.open(built.target_path, cores, **sizes))
        draft = stack.enter_context(CpuEngine.open(built.draft_path, cores, **sizes))
        draft.attach(target)
        weights = stack.enter_context(CheckpointWeights(target_dir))
        reference = ReferenceModel(load_model_config(target_dir), weights, round_to_bf16=True)
        yield Pair(Harness(target), draft, TorchMedusa(heads_dir, target_dir), reference, built.draft_path)


def draft(pair: Pair, requests: list[tuple[list[int], int, int]]):
    """requests: known tokens, of which so many are committed, and drafts wanted -> per request its new drafts and
    their q."""
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN, new_key=lambda: 7)
    bound = []
    for slot, (tokens, num_tokens, _) in enumerate(requests):
        request = Request(str(slot), tokens[:num_tokens], SAMPLED, max_seq_len=64, max_draft_len=MAX_DRAFT_LEN)
        request.tokens[: len(tokens)] = tokens
        table.bind(slot, request)
        bound.append(request)
    batch = pair.target.batch([(slot, t, n - 1, n) for slot, (t, n, _) in enumerate(requests)])
    counts = [(n, len(t) - n, wanted) for t, n, wanted in requests]
    num_tokens, num_drafts, num_new = (np.array(column, np.int32) for column in zip(*counts, strict=True))
    found = pair.draft.draft(DraftBatch(batch, table.array, num_tokens, num_drafts, num_new, MAX_DRAFT_LEN)).tolist()
    drafted = []
    for slot, ((tokens, _, _), count) in enumerate(zip(requests, found, strict=True)):
        end = len(tokens) + count
        places = [position % MAX_DRAFT_LEN for position in range(len(tokens), end)]
        drafted.append((bound[slot].tokens[len(tokens) : end].tolist(), table.draft_probs.rows(slot)[places].copy()))
    return drafted


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    """Within bf16 error of the target's layers and the heads': 0.01 to 0.025 were seen."""
    logits = np.log(found), np.log(wanted)
    possible = wanted > 1e-4
    assert possible.any(-1).all()
    error = (logits[0] - logits[1])[possible]
    assert np.sqrt(np.square(error).mean()) < 0.04 * logits[1][possible].std()


def test_laws_of_drafts_match_torch(pair):
    """Requests at once, at places of their own: without pending drafts, with one and two, and one that wants none."""
    rng = np.random.default_rng(5)
    tokens = [rng.integers(2, VOCAB, n).tolist() for n in (9, 40, 17, 6)]
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    requests = [(tokens[0], 9, 3), (tokens[1], 38, 1), (tokens[2], 16, 2), (tokens[3], 6, 0)]
    for (known, num_tokens, wanted), (drafts, q) in zip(requests, draft(pair, requests), strict=True):
        assert len(drafts) == wanted
        if wanted:
            first = len(known) - num_tokens
            check(q, pair.laws(known, num_tokens)[first : first + wanted])


def test_a_place_without_a_head_gets_no_draft(pair):
    rng = np.random.default_rng(6)
    tokens = [rng.integers(2, VOCAB, n).tolist() for n in (12, 8)]
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    (alone, _), (behind, q) = draft(pair, [(tokens[0], 12, MAX_DRAFT_LEN), (tokens[1], 6, 3)])
    assert len(alone) == pair.heads.num_heads
    assert len(behind) == min(3, pair.heads.num_heads - 2)
    check(q, pair.laws(tokens[1], 6)[2 : 2 + len(behind)])


def test_a_row_does_not_depend_on_the_others(pair):
    """Bit for bit."""
    rng = np.random.default_rng(7)
    tokens = [rng.integers(2, VOCAB, n).tolist() for n in (30, 21, 5)]
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    ((_, alone),) = draft(pair, [(tokens[0], 28, 1)])
    beside = draft(pair, [(tokens[0], 28, 1), (tokens[1], 21, 3), (tokens[2], 5, 2)])
    assert np.array_equal(beside[0][1], alone)


def test_heads_without_their_target_or_with_another_run_nothing(pair, tmp_path):
    sizes = {"tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 8}
    other_dir = make_checkpoint(tmp_path / "t", vocab_size=VOCAB, hidden_size=128, num_layers=2)
    other = build_engines(BuildOptions(other_dir, None, tmp_path / "e", **SIZES)).target_path
    with CoreSet(num_threads=1) as cores, CpuEngine.open(pair.path, cores, num_blocks=4, **sizes) as lonely:
        with pytest.raises(InvalidArgumentError):
            lonely.forward(pair.target.batch([(0, [5, 6], 0, 2)]))
        with (
            CpuEngine.open(other, cores, num_blocks=4, **sizes) as target,
            pytest.raises(EngineFileError, match="of another target; rebuild"),
        ):
            lonely.attach(target)


def test_they_have_no_kv(pair):
    """Their memory does not grow with the cache."""
    sizes = {"tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 8}
    with CoreSet(num_threads=1) as cores:
        found = []
        for num_blocks in (4, 400):
            with CpuEngine.open(pair.path, cores, num_blocks=num_blocks, **sizes) as engine:
                found.append(engine.memory_bytes)
    assert found[0] == found[1]
