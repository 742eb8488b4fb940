"""The EAGLE-3 head and the MTP layer on the CPU engine: their drafts' laws are those of the published forward pass in
torch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

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
from tests.support.eagle3 import TorchHead, make_head, torch_head
from tests.support.engine_harness import Harness
from tests.support.mtp import TorchMtp, make_mimo

VOCAB, NUM_LAYERS, NUM_SLOTS, MAX_DRAFT_LEN, MAX_SEQ_LEN = 320, 4, 4, 5, 64
SIZES = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128, "max_draft_len": MAX_DRAFT_LEN}
NUM_BLOCKS = 4 * NUM_SLOTS
VARIANTS = {
    "safeailab": ({}, {}),
    "specforge": ({}, {"naming": "layers.0", "layers": (1, 2, 4), "own_embedding": False}),
    "prefixed": ({}, {"prefix": "model.", "layers": (0, 3), "norm_before_residual": True}),
    "whole_vocabulary": ({}, {"draft_vocab_size": None, "layers": (2,)}),
    "odd_sizes": ({"hidden_size": 70, "num_heads": 5, "num_kv_heads": 1, "head_dim": 18}, {"draft_vocab_size": 33}),
}
MTP_VARIANTS = {  # of the target, and whether the layer reads behind its final norm
    "mtp": ({}, False),
    "mtp_normed": ({}, True),
    "mtp_odd_sizes": ({"hidden_size": 70, "num_heads": 5, "num_kv_heads": 1, "head_dim": 18, "tie": True}, False),
}


@dataclass
class Pair:
    target: Harness
    draft: CpuEngine
    torch_head: TorchHead | TorchMtp
    reference: ReferenceModel
    layers: tuple[int, ...]
    path: Path

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden rows [n, layers * hidden], rounded to bf16: read between its segments, which are its
        layers, and what leaves the last from torch."""
        rows, batch = self.reference.hidden_rows(tokens), self.target.batch([(0, tokens, 0, len(tokens))])
        for segment in range(NUM_LAYERS):
            self.target.engine.run_segment(batch, segment)
            if segment < NUM_LAYERS - 1:
                rows[segment + 1] = torch.from_numpy(self.target.engine.hidden_rows(len(tokens)).copy())
        return torch.cat([rows[layer] for layer in self.layers], -1).bfloat16().float()

    def laws(self, tokens: list[int], num_tokens: int, first: int) -> np.ndarray:
        """Distributions [.., vocab] behind tokens[:first], tokens[:first + 1] and so on, of which the target has run
        all but the last of num_tokens: beyond, the head goes on from its own outputs."""
        features = self.torch_head.features(self.hidden(tokens[: num_tokens - 1]))
        while True:
            outputs, logits = self.torch_head.forward(features, tokens[1 : len(features) + 1])
            if len(features) == len(tokens) - 1:
                return logits[first - 2 :].softmax(-1).numpy()
            features = torch.cat((features, outputs[-1:]))


@pytest.fixture(scope="module", params=[*VARIANTS, *MTP_VARIANTS])
def pair(request, tmp_path_factory):
    root: Path = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": VOCAB, "num_layers": NUM_LAYERS}
    limits = {"output_dir": root / "e", "exit_layers": (1, 2, 3), **SIZES}
    if request.param in VARIANTS:
        of_target, of_head = VARIANTS[request.param]
        of_head = {"layers": (0, 1, 3)} | of_head
        target_dir = make_checkpoint(root / "t", **sizes, **of_target)
        head_dir = make_head(root / "h", target_dir, **of_head)
        built = build_engines(BuildOptions(target_dir, head_dir, **limits))
        layers, head = of_head["layers"], torch_head(head_dir, target_dir)
    else:
        of_target, reads_normed = MTP_VARIANTS[request.param]
        target_dir = make_mimo(root / "t", **sizes, **of_target)
        built = build_engines(BuildOptions(target_dir, None, mtp=True, mtp_reads_normed=reads_normed, **limits))
        layers, head = (NUM_LAYERS,), TorchMtp(target_dir, reads_normed)
    sizes = {"num_blocks": NUM_BLOCKS, "tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128}
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=2))
        target = stack.enter_context(CpuEngine.open(built.target_path, cores, **sizes))
        draft = stack.enter_context(CpuEngine.open(built.draft_path, cores, **sizes))
        draft.attach(target)
        weights = stack.enter_context(CheckpointWeights(target_dir))
        reference = ReferenceModel(load_model_config(target_dir), weights, round_to_bf16=True)
        yield Pair(Harness(target), draft, head, reference, layers, built.draft_path)


def draft(pair: Pair, requests: list[tuple[list[int], int, int, int]], params: SamplingParams):
    """requests: known tokens, of which so many are committed, of which the head has run so many, and drafts wanted ->
    per request its tokens with the drafts, and their q."""
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN, new_key=lambda: 7)
    bound = []
    for slot, (tokens, num_tokens, _, _) in enumerate(requests):
        request = Request(str(slot), tokens[:num_tokens], params, max_seq_len=64, max_draft_len=MAX_DRAFT_LEN)
        request.tokens[: len(tokens)] = tokens
        table.bind(slot, request)
        bound.append(request)
    rows = [(slot, t, first, n) for slot, (t, n, first, _) in enumerate(requests)]
    batch = pair.target.batch(rows)
    counts = [(n, len(t) - n, wanted) for t, n, _, wanted in requests]
    num_tokens, num_drafts, num_new = (np.array(column, np.int32) for column in zip(*counts, strict=True))
    found = pair.draft.draft(DraftBatch(batch, table.array, num_tokens, num_drafts, num_new, MAX_DRAFT_LEN))
    assert found.tolist() == num_new.tolist()
    drafted = []
    for slot, (tokens, _, _, wanted) in enumerate(requests):
        end = len(tokens) + wanted
        places = [position % MAX_DRAFT_LEN for position in range(len(tokens), end)]
        drafted.append((bound[slot].tokens[:end].tolist(), table.draft_probs.rows(slot)[places].copy()))
    return drafted


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal where a token cannot be drafted, and within bf16 error elsewhere."""
    assert np.array_equal(found == 0, wanted == 0)
    logits = [np.log(np.where(law > 0, law, 1.0)) for law in (found, wanted)]
    possible = wanted > 1e-4
    assert possible.any(-1).all()
    error = (logits[0] - logits[1])[possible]
    assert np.sqrt(np.square(error).mean()) < 0.02 * logits[1][possible].std()


SAMPLED = SamplingParams(max_tokens=20, temperature=1.0)


def test_laws_of_drafts_match_torch(pair):
    """Requests at once: a prompt that is new, one of which rows are there, with pending drafts and without, and one
    that drafts nothing."""
    rng = np.random.default_rng(5)
    tokens = [rng.integers(2, VOCAB, n).tolist() for n in (9, 40, 17, 6)]
    if pair.torch_head.config["draft_vocab_size"] < VOCAB:
        assert 0 < (pair.laws(tokens[0], 9, 9) == 0).sum() < VOCAB
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
    # of the second the first 35 are committed and 20 run, of the third all but two
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)], SAMPLED)
    requests = [(tokens[0], 9, 0, 5), (tokens[1][:38], 35, 20, 2), (tokens[2], 16, 0, 4), (tokens[3], 6, 0, 0)]
    drafted = draft(pair, requests, SAMPLED)
    for (known, num_tokens, _, wanted), (result, q) in zip(requests, drafted, strict=True):
        if wanted:
            check(q, pair.laws(result[:-1], num_tokens, len(known)))


def test_rows_of_pending_drafts_are_run_again_with_the_targets_rows(pair):
    rng = np.random.default_rng(6)
    tokens = rng.integers(2, VOCAB, 12).tolist()
    pair.target.run([(0, tokens, 0, 11)])
    ((result, _),) = draft(pair, [(tokens, 12, 0, 4)], SAMPLED)
    pair.target.run([(0, result, 11, 14)])
    ((longer, q),) = draft(pair, [(result[:14], 14, 12, 3)], SAMPLED)
    check(q, pair.laws(longer[:-1], 14, 14))


def test_a_row_does_not_depend_on_the_others_or_on_chunks(pair):
    """Bit for bit: alone in one call, or beside others after chunks of the prompt in several."""
    rng = np.random.default_rng(7)
    tokens = [rng.integers(2, VOCAB, n).tolist() for n in (30, 21, 5)]
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    ((_, alone),) = draft(pair, [(tokens[0], 28, 0, 3)], SAMPLED)
    draft(pair, [(tokens[0][:7], 7, 0, 0), (tokens[1][:20], 20, 0, 0)], SAMPLED)
    draft(pair, [(tokens[0][:19], 19, 7, 0)], SAMPLED)
    beside = draft(pair, [(tokens[0], 28, 19, 3), (tokens[1], 21, 20, 5), (tokens[2], 4, 0, 2)], SAMPLED)
    assert np.array_equal(beside[0][1], alone)


def test_a_head_without_its_target_or_with_another_runs_nothing(pair):
    sizes = {"tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 8}
    with CoreSet(num_threads=1) as cores, CpuEngine.open(pair.path, cores, num_blocks=4, **sizes) as lonely:
        with pytest.raises(InvalidArgumentError):
            lonely.forward(pair.target.batch([(0, [5, 6], 0, 2)]))
        with pytest.raises(EngineFileError, match="of another target; rebuild"):
            lonely.attach(pair.target.engine)
