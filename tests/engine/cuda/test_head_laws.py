"""Draft heads on the cuda engine: what their target keeps for them, and drafts whose laws are torch's. The EAGLE-3 head
and the MTP layer go on from their own outputs; Medusa heads run in steps that only go to the next place."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.shard import Shard
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cuda.medusa import MedusaWeights
from faser_trtllm.engine.cuda.memory import place_logits_bytes
from faser_trtllm.engine.cuda.open import blocks_of
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import build_with_head
from tests.engine.cuda.heads import (
    MAX_DRAFT_LEN,
    NUM_SLOTS,
    VOCAB,
    Pair,
    check_bfloat16,
    draft,
    laws,
    open_pair,
    random_tokens,
)
from tests.engine.cuda.host_executor import HostGpu
from tests.support.eagle3 import make_deepspec_head, make_head, make_speculators_head, torch_head
from tests.support.medusa import TorchMedusa, make_medusa
from tests.support.mtp import TorchMtp

GOES_ON: dict[str, dict[str, Any]] = {
    "safeailab": {"layers": (0, 1, 3)},
    "specforge": {"naming": "layers.0", "layers": (1, 2, 4), "own_embedding": False, "norm_before_residual": True},
    "whole_vocabulary": {"draft_vocab_size": None, "layers": (2,)},
    "eagle31": {"layers": (1, 2, 3), "fc_norm": True, "norm_output": True, "eagle3_norm_output": "fed"},
    "speculators": {
        "make": make_speculators_head,
        "layers": (0, 2, 4),
        "num_layers": 3,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
    },
    "deepspec": {"make": make_deepspec_head, "layers": (0, 1, 2, 3), "num_layers": 1},
    "mtp": {"make": None},
    "mtp_normed": {"make": None, "mtp_reads_normed": True},
}
MEDUSA: dict[str, dict[str, Any]] = {
    "medusa": {"make": make_medusa, "num_heads": 5},
    "medusa_few": {"make": make_medusa, "num_heads": 3},
    "medusa_deep": {"make": make_medusa, "num_heads": 4, "num_layers": 2, "biases": False},
}
VARIANTS = GOES_ON | MEDUSA


class CountingOps(ExactOps):
    num_products = 0

    def logits(self, x, lm_head, out):
        self.num_products += 1
        super().logits(x, lm_head, out)


def opened(directory: Path, stack: ExitStack, *args, make=make_head, **head) -> Pair:
    engines = build_with_head(directory, make, exit_layers=(1, 3), **head)
    if make is None:
        torch_pass: Any = TorchMtp(directory / "t", head.get("mtp_reads_normed", False))
    else:
        torch_pass = (TorchMedusa if make is make_medusa else torch_head)(directory / "h", directory / "t")
    return open_pair(engines, stack, torch_pass, *args)


def kept_rows(pair: Pair, slot: int, count: int) -> torch.Tensor:
    """Return the hidden rows that the target kept for a slot's first tokens."""
    places = np.arange(count)
    blocks = pair.target.block_table[slot, places // 32].astype(np.int64)
    return pair.kept.tensor[torch.from_numpy(blocks * 32 + places % 32)]


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with ExitStack() as stack:
        yield opened(tmp_path_factory.mktemp(request.param), stack, **VARIANTS[request.param])


only_going_on = pytest.mark.parametrize("pair", GOES_ON, indirect=True)


@only_going_on
def test_the_target_keeps_its_hidden_rows_of_named_layers(pair: Pair) -> None:
    """The target runs whole passes, chunks, and segments between which rows are dropped."""
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
    that drafts nothing. Places without a head get no draft. A second call begins anew."""
    tokens = random_tokens(5, 9, 40, 17, 6)
    if not pair.is_medusa and pair.head.config["draft_vocab_size"] < VOCAB:
        assert 0 < (laws(pair, tokens[0], 9, 9) == 0).sum() < VOCAB
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
    # of the second the first 35 are committed and 20 run, of the third all but two
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)])
    requests = [(tokens[0], 9, 0, 5), (tokens[1][:38], 35, 20, 2), (tokens[2], 15, 0, 3), (tokens[3], 6, 0, 0)]
    drafted = draft(pair, requests) + draft(pair, requests)
    for (known, num_tokens, _, wanted), (result, q) in zip(2 * requests, drafted, strict=True):
        if pair.is_medusa:
            wanted = min(wanted, pair.head.num_heads - (len(known) - num_tokens))
        assert len(result) == len(known) + wanted
        if wanted:
            expected = laws(pair, result[:-1], num_tokens, len(known))[:wanted]
            np.testing.assert_allclose(q, expected, atol=2e-5)


@only_going_on
def test_rows_of_pending_drafts_are_run_again_with_the_targets_rows(pair: Pair) -> None:
    (tokens,) = random_tokens(6, 12)
    pair.target.run([(0, tokens, 0, 11)])
    ((result, _),) = draft(pair, [(tokens, 12, 0, 4)])
    pair.target.run([(0, result, 11, 14)])
    ((longer, q),) = draft(pair, [(result[:14], 14, 12, 3)])
    np.testing.assert_allclose(q, laws(pair, longer[:-1], 14, 14), atol=2e-5)


@pytest.mark.parametrize(
    "head",
    [
        {"layers": (0, 1, 3)},
        GOES_ON["eagle31"] | {"num_layers": 2},
        {"make": None},
        {"make": make_medusa, "num_heads": 5, "num_layers": 2},
    ],
    ids=["eagle3", "eagle31", "mtp", "medusa"],
)
def test_bfloat16_stays_near_torch(tmp_path: Path, head: dict[str, Any]) -> None:
    tokens = random_tokens(8, 30, 21)
    with ExitStack() as stack:
        pair = opened(tmp_path, stack, torch.bfloat16, ReferenceOps, **head)
        pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
        requests = [(t, len(t), 0, 4) for t in tokens]
        for (known, num_tokens, _, _), (result, q) in zip(requests, draft(pair, requests), strict=True):
            assert len(result) == len(known) + 4
            check_bfloat16(q, laws(pair, result[:-1], num_tokens, len(known))[:4])


@only_going_on
def test_a_head_must_run_the_last_committed_row(pair: Pair) -> None:
    (tokens,) = random_tokens(9, 8)
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN)
    counts = [np.array([number], np.int32) for number in (7, 1, 2)]
    with pytest.raises(InvalidArgumentError, match="the row of its last committed token"):
        pair.draft.draft(DraftBatch(pair.target.batch([(0, tokens, 0, 8)]), table.array, *counts, MAX_DRAFT_LEN))


def test_a_draft_call_reads_each_medusa_head_once(tmp_path: Path) -> None:
    """And none where nobody drafts: there is no KV to bring up to date."""
    (tokens,) = random_tokens(6, 12)
    with ExitStack() as stack:
        ops: list[CountingOps] = []

        def counting() -> CountingOps:
            ops.append(CountingOps())
            return ops[-1]

        pair = opened(tmp_path, stack, torch.float32, counting, make=make_medusa, num_heads=5)
        pair.target.run([(0, tokens, 0, 12)])
        draft(pair, [(tokens, 10, 0, 3)])
        assert ops[1].num_products == 5
        draft(pair, [(tokens, 12, 0, 0)])
        assert ops[1].num_products == 5


def test_medusa_engines_in_float16_hold_the_same_weights(tmp_path: Path) -> None:
    found = []
    for dtype in ("bfloat16", "float16"):
        engines = build_with_head(tmp_path / dtype, make_medusa, dtype, num_heads=2, num_layers=2)
        with CudaFile.open(engines.draft_path) as file:
            found.append(MedusaWeights.load(file, torch.device("cpu"), torch.float32).tensors)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-7, rtol=0, msg=name)  # what fp16 cannot hold


def test_medusa_logits_are_counted(tmp_path: Path) -> None:
    """The logits of all places, and they are named where not even one request fits."""
    engines = build_with_head(tmp_path, make_medusa, num_heads=3)
    assert place_logits_bytes(engines.draft_path, 4) == 4 * 3 * 4 * VOCAB
    assert place_logits_bytes(engines.target_path, 4) == 0
    request, gpu = OpenRequest(engines, engines.build_config, 16, drafting=True), HostGpu()
    gpu.num_free_bytes = 1000
    parts = "logits and draft probs 0.00, logits with penalties 0.00, logits of the Medusa heads 0.00, KV caches"
    with pytest.raises(ConfigError, match=parts):
        blocks_of(request, gpu, Shard())
