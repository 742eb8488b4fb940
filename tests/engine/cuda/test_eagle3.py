"""The EAGLE-3 head and the MTP layer on the cuda engine: what their target keeps for them, and drafts whose laws are
torch's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.harness import build_with_head
from tests.engine.cuda.heads import (
    MAX_DRAFT_LEN,
    NUM_SLOTS,
    VOCAB,
    Pair,
    check_bfloat16,
    draft,
    open_pair,
    random_tokens,
)
from tests.support.eagle3 import make_head, torch_head
from tests.support.mtp import TorchMtp

VARIANTS = {
    "safeailab": {"layers": (0, 1, 3)},
    "specforge": {"naming": "layers.0", "layers": (1, 2, 4), "own_embedding": False, "norm_before_residual": True},
    "whole_vocabulary": {"draft_vocab_size": None, "layers": (2,)},
    "mtp": {"make": None},
    "mtp_normed": {"make": None, "mtp_reads_normed": True},
}


def opened(directory: Path, stack: ExitStack, *args, make=make_head, mtp_reads_normed=False, **head) -> Pair:
    options = {"mtp_reads_normed": mtp_reads_normed, **head}
    engines = build_with_head(directory, make, exit_layers=(1, 3), **options)
    if make is None:
        return open_pair(engines, stack, TorchMtp(directory / "t", mtp_reads_normed), *args)
    return open_pair(engines, stack, torch_head(directory / "h", directory / "t"), *args)


def kept_rows(pair: Pair, slot: int, count: int) -> torch.Tensor:
    """What the target kept of a slot's first tokens."""
    places = np.arange(count)
    blocks = pair.target.block_table[slot, places // 32].astype(np.int64)
    return pair.kept.tensor[torch.from_numpy(blocks * 32 + places % 32)]


def laws(pair: Pair, tokens: list[int], num_tokens: int, first: int) -> np.ndarray:
    """Distributions [.., vocab] behind tokens[:first], tokens[:first + 1] and so on, of which the target has run all
    but the last of num_tokens: beyond, the head goes on from its own outputs."""
    features = pair.head.features(pair.hidden(tokens[: num_tokens - 1]))
    while True:
        outputs, logits = pair.head.forward(features, tokens[1 : len(features) + 1])
        if len(features) == len(tokens) - 1:
            return logits[first - 2 :].softmax(-1).numpy()
        features = torch.cat((features, outputs[-1:]))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with ExitStack() as stack:
        yield opened(tmp_path_factory.mktemp(request.param), stack, **VARIANTS[request.param])


def test_the_target_keeps_its_hidden_rows_of_named_layers(pair: Pair) -> None:
    """By whole passes, in chunks, and by segments between which rows are dropped."""
    first, second = random_tokens(1, 50, 40)
    pair.target.run([(0, first, 0, 33), (2, second, 0, 7)])
    pair.target.run([(2, second, 7, 40), (0, first, 33, 50)])
    for slot, tokens in ((0, first), (2, second)):
        torch.testing.assert_close(kept_rows(pair, slot, len(tokens)), pair.hidden(tokens), atol=2e-5, rtol=2e-5)
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
    torch.testing.assert_close(kept_rows(pair, 0, 9), pair.hidden(third[:9]), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(kept_rows(pair, 2, 7), pair.hidden(fourth[:7]), atol=2e-5, rtol=2e-5)
    others = np.setdiff1d(np.arange(16), np.r_[pair.target.block_table[0], pair.target.block_table[2]])
    places = torch.from_numpy(np.concatenate([np.arange(block * 32, block * 32 + 32) for block in others]))
    assert torch.equal(pair.kept.tensor[places], before[places]), "other requests' blocks are left alone"


def test_laws_of_drafts_match_torch(pair: Pair) -> None:
    """Requests at once: a prompt that is new, one of which rows are there, with pending drafts and without, and one
    that drafts nothing."""
    tokens = random_tokens(5, 9, 40, 17, 6)
    if pair.head.config["draft_vocab_size"] < VOCAB:
        assert 0 < (laws(pair, tokens[0], 9, 9) == 0).sum() < VOCAB
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
    # of the second the first 35 are committed and 20 run, of the third all but two
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)])
    requests = [(tokens[0], 9, 0, 5), (tokens[1][:38], 35, 20, 2), (tokens[2], 15, 0, 3), (tokens[3], 6, 0, 0)]
    drafted = draft(pair, requests)
    for (known, num_tokens, _, wanted), (result, q) in zip(requests, drafted, strict=True):
        assert len(result) == len(known) + wanted
        if wanted:
            np.testing.assert_allclose(q, laws(pair, result[:-1], num_tokens, len(known)), atol=2e-5)


def test_rows_of_pending_drafts_are_run_again_with_the_targets_rows(pair: Pair) -> None:
    (tokens,) = random_tokens(6, 12)
    pair.target.run([(0, tokens, 0, 11)])
    ((result, _),) = draft(pair, [(tokens, 12, 0, 4)])
    pair.target.run([(0, result, 11, 14)])
    ((longer, q),) = draft(pair, [(result[:14], 14, 12, 3)])
    np.testing.assert_allclose(q, laws(pair, longer[:-1], 14, 14), atol=2e-5)


@pytest.mark.parametrize("head", [{"layers": (0, 1, 3)}, {"make": None}], ids=["eagle3", "mtp"])
def test_bfloat16_stays_near_torch(tmp_path: Path, head: dict[str, Any]) -> None:
    tokens = random_tokens(8, 30, 21)
    with ExitStack() as stack:
        pair = opened(tmp_path, stack, torch.bfloat16, ReferenceOps, **head)
        pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
        requests = [(t, len(t), 0, 4) for t in tokens]
        for (known, num_tokens, _, _), (result, q) in zip(requests, draft(pair, requests), strict=True):
            assert len(result) == len(known) + 4
            check_bfloat16(q, laws(pair, result[:-1], num_tokens, len(known)))


def test_a_head_must_run_the_last_committed_row(pair: Pair) -> None:
    (tokens,) = random_tokens(9, 8)
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN)
    counts = [np.array([number], np.int32) for number in (7, 1, 2)]
    with pytest.raises(InvalidArgumentError, match="the row of its last committed token"):
        pair.draft.draft(DraftBatch(pair.target.batch([(0, tokens, 0, 8)]), table.array, *counts, MAX_DRAFT_LEN))
