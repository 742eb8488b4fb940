"""Block drafters on the cuda engine: laws are torch's, whatever runs next to them, and no wrong way of reading a
checkpoint has them. On the host, in float32 with sums in float64; the kernels' part emulated."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.shard import Shard
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cuda.open import blocks_of, head_buffers
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.harness import WHOLE, build_with_head
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
from tests.ops.cuda.emulation import emulated
from tests.support.block_drafter import make_block_drafter
from tests.support.block_drafter_reference import TorchBlockDrafter
from tests.support.effort import pick

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"layers": (1, 2), "block_size": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {"layers": (0, 1, 4)},
    "sliding": {"layout": "dflash_nested", "windows": (12, 0, 5), "num_layers": 3},
    "dflash2": {"layout": "dflash2", "windows": (12, 12)},
    "dspark": {"layout": "dspark"},
    "speculators": {"layout": "speculators_dspark", "layers": (1, 3)},
    "biases": {"attention_bias": True},
    "another_width": {"layout": "dspark_plain", "hidden_size": 32, "intermediate_size": 48, "block_size": 5},
}
WRONG: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "a position early": {"position_shift": -1},
    "a position late": {"position_shift": 1},
    "the context normed like a decoder's rows": {"norms_context": True},
    "the other slots": {"first_slot": 0},
}


def opened(directory: Path, stack: ExitStack, *args: Any, **drafter: Any) -> Pair:
    engines = build_with_head(directory, make_block_drafter, exit_layers=(1, 3), **(SIZES | drafter))
    return open_pair(engines, stack, TorchBlockDrafter(directory / "h", directory / "t"), *args)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with ExitStack() as stack:
        yield opened(tmp_path_factory.mktemp(request.param), stack, **VARIANTS[request.param])


def expected(pair: Pair, known: list[int], result: list[int]) -> np.ndarray:
    return laws(pair, result, len(known), len(known))[: len(result) - len(known)]


def test_laws_of_drafts_match_torch(pair: Pair) -> None:
    """Requests at once: a new one, one whose context is there in part, one that ends a KV block and one of a single
    token. A second call begins anew."""
    tokens = random_tokens(5, 9, 40, 33, 1)
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens) if len(t) > 1])
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)])
    requests = [
        (t, len(t), first, wanted) for t, first, wanted in zip(tokens, (0, 20, 0, 0), (5, 2, 3, 4), strict=True)
    ]
    for (known, _, _, wanted), (result, q) in zip(2 * requests, draft(pair, requests) * 2, strict=True):
        assert len(result) == len(known) + wanted
        np.testing.assert_allclose(q, expected(pair, known, result), atol=3e-5)


@pytest.mark.parametrize("length", [16, 31, 32, 64, 124, 127])
def test_a_block_may_cross_the_ends_of_kv_blocks_and_of_the_context(pair: Pair, length: int) -> None:
    (tokens,) = random_tokens(length, length)
    pair.target.run([(1, tokens, 0, length - 1)])
    requests = [([3], 1, 0, 0), (tokens, length, 0, min(4, 128 - length))]
    known, (result, q) = tokens, draft(pair, requests)[1]
    np.testing.assert_allclose(q, expected(pair, known, result), atol=3e-5)


def test_laws_have_the_same_bits_in_any_batch_and_chunks(pair: Pair) -> None:
    tokens = random_tokens(7, 40, 21, 35)
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
    together = draft(pair, [(t, len(t), 0, 4) for t in tokens])
    for slot, known in enumerate(tokens):
        chunks = [[([1], 1, 0, 0)] * slot + [(known[:end], end, first, 0)] for first, end in ((0, 7), (7, 18))]
        for chunk in chunks:
            draft(pair, chunk)
        others = [([1], 1, 0, 0)] * slot
        alone = draft(pair, [*others, (known, len(known), 18, 4)])[-1]
        assert alone[0] == together[slot][0]
        assert alone[1].tobytes() == together[slot][1].tobytes()


def test_a_drafted_block_is_in_no_block_of_anybody(pair: Pair) -> None:
    """Ids after a request's last block may be anybody's, and its last tokens another request's after a prefix hit."""
    first, second = random_tokens(8, 31, 60)
    table = pair.target.block_table
    mine = table[0].copy()
    try:
        table[0, 1:] = table[1, : table.shape[1] - 1]
        pair.target.run([(0, first, 0, 30), (1, second, 0, 59)])
        before = draft(pair, [([1], 1, 0, 0), (second, 60, 0, 4)])[1]
        draft(pair, [(first, 31, 0, 4)])
        after = draft(pair, [([1], 1, 0, 0), (second, 60, 59, 4)])[1]
    finally:
        table[0] = mine
    assert before[0] == after[0]
    assert before[1].tobytes() == after[1].tobytes()


def test_accepted_drafts_become_context(pair: Pair) -> None:
    (tokens,) = random_tokens(6, 30)
    pair.target.run([(0, tokens, 0, 29)])
    ((result, _),) = draft(pair, [(tokens, 30, 0, 4)])
    pair.target.run([(0, result, 29, 33)])
    ((longer, q),) = draft(pair, [(result[:33], 33, 29, 4)])
    np.testing.assert_allclose(q, expected(pair, result[:33], longer), atol=3e-5)


@pytest.mark.parametrize("wrong", WRONG)
def test_no_wrong_reading_has_these_laws(tmp_path: Path, wrong: str) -> None:
    with ExitStack() as stack:
        right = opened(tmp_path, stack)
        tokens = random_tokens(3, 30)
        right.target.run([(0, tokens[0], 0, 29)])
        ((result, q),) = draft(right, [(tokens[0], 30, 0, 5)])
        np.testing.assert_allclose(q, expected(right, tokens[0], result), atol=3e-5)
        right.head = TorchBlockDrafter(tmp_path / "h", tmp_path / "t", **WRONG[wrong])
        assert np.abs(q - expected(right, tokens[0], result)[: len(q)]).max() > 1e-2


@pytest.mark.parametrize("shift", [-1, 1])
def test_rows_of_the_next_layer_have_other_laws(tmp_path: Path, shift: int) -> None:
    with ExitStack() as stack:
        pair = opened(tmp_path, stack)
        (tokens,) = random_tokens(3, 30)
        pair.target.run([(0, tokens, 0, 29)])
        ((result, q),) = draft(pair, [(tokens, 30, 0, 5)])
        pair.layers = tuple(layer + shift for layer in pair.layers)
        assert np.abs(q - expected(pair, tokens, result)).max() > 1e-2


def test_graphs_change_no_bit(pair: Pair) -> None:
    tokens = random_tokens(7, 9, 20, 17)
    requests = [(t, len(t), 0, wanted) for t, wanted in zip(tokens, (3, 5, 4), strict=True)]
    found = []
    for captures in (False, True):
        if captures:
            pair.draft.capture_graphs([WHOLE])
            assert ("logits", 4, WHOLE.name) in pair.draft.graphs
        pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
        found.append([(result, q.tobytes()) for result, q in draft(pair, requests)])
    assert found[0] == found[1]


@pytest.mark.parametrize("variant", pick(["sliding", "dflash2"], VARIANTS))
def test_bfloat16_by_the_kernels_stays_near_torch(tmp_path: Path, variant: str) -> None:
    """append_kv, copy_kv, gated_silu and verify_attention themselves, emulated. DFlash2 rounds at its convolutions and
    in the scores of pairs, too."""
    stems = {stem: emulated(stem) for stem in ("append_kv", "copy_kv", "gated_silu")}
    attention = {"verify_attention": emulated("verify_attention", {"FASER_HEAD_DIM": 64})}
    kernels = Ops(stems | attention, lambda: 0, num_sms=4)

    def make_ops() -> Ops:
        ops = ReferenceOps()
        for name in ("append_kv", "copy_kv", "gated_silu", "verify_attention"):
            setattr(ops, name, getattr(kernels, name))
        return ops

    tokens = random_tokens(8, 30, 21)
    with ExitStack() as stack:
        # With rounding, the best few tokens are others.
        block = {"block": {"selector_top_k": VOCAB - 1}} if variant == "dflash2" else {}
        pair = opened(tmp_path, stack, torch.bfloat16, make_ops, **VARIANTS[variant], **block)
        pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
        requests = [(t, len(t), 0, 4) for t in tokens]
        for (known, _, _, _), (result, q) in zip(requests, draft(pair, requests), strict=True):
            check_bfloat16(q, expected(pair, known, result), 0.08 if variant == "dflash2" else 0.03)


def test_a_block_is_not_extended(pair: Pair) -> None:
    (tokens,) = random_tokens(9, 8)
    table = SamplingTable(NUM_SLOTS, VOCAB, MAX_DRAFT_LEN)
    counts = [np.array([number], np.int32) for number in (7, 1, 2)]
    with pytest.raises(InvalidArgumentError, match="a block drafter drafts for requests without pending drafts"):
        pair.draft.draft(DraftBatch(pair.target.batch([(0, tokens, 0, 8)]), table.array, *counts, MAX_DRAFT_LEN))


def test_drafting_ends_with_the_block(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = opened(tmp_path, stack, block_size=4)
        (tokens,) = random_tokens(9, 8)
        pair.target.run([(0, tokens, 0, 7)])
        ((result, _),) = draft(pair, [(tokens, 8, 0, 5)])
        assert len(result) == 8 + 3


def test_what_blocks_need_is_counted(tmp_path: Path) -> None:
    """Their KV and their logits, named where not even one request fits."""
    engines = build_with_head(tmp_path, make_block_drafter, **SIZES)
    request, gpu = OpenRequest(engines, engines.build_config, 16, drafting=True), HostGpu()
    tokens = 2 * engines.build_config.tokens_per_block
    kv = 4 * tokens * 2 * 2 * 2 * 64 * 2  # requests, layers, K and V, KV heads, head_dim, bytes
    assert head_buffers(request) == {"KV of drafted blocks": kv, "logits of drafted blocks": 4 * 4 * 5 * VOCAB}
    gpu.num_free_bytes = 1000
    with pytest.raises(ConfigError, match=r"KV of drafted blocks 0.00, logits of drafted blocks 0.00, KV caches"):
        blocks_of(request, gpu, Shard())


def test_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"dtype is float16, but the draft is a block drafter.* use bfloat16"
    ):
        build_with_head(tmp_path, make_block_drafter, "float16", **SIZES)
    assert not (tmp_path / "e" / "manifest.json").exists()
    assert json.loads((tmp_path / "h" / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
