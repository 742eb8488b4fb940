"""Medusa heads on the cuda engine: drafts whose laws are torch's, in steps that only go to the next place."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.shard import Shard
from faser_trtllm.engine.cuda.medusa import MedusaWeights
from faser_trtllm.engine.cuda.memory import place_logits_bytes
from faser_trtllm.engine.cuda.open import blocks_of
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import build_with_head
from tests.engine.cuda.heads import VOCAB, Pair, check_bfloat16, draft, open_pair, random_tokens
from tests.engine.cuda.host_executor import HostGpu
from tests.support.medusa import TorchMedusa, make_medusa

VARIANTS = {
    "plain": {"num_heads": 5},
    "few": {"num_heads": 3},
    "deep": {"num_heads": 4, "num_layers": 2, "biases": False},
}


class SmallGpu(HostGpu):
    def free_bytes(self) -> int:
        return 1000


class CountingOps(ExactOps):
    num_products = 0

    def logits(self, x, lm_head, out):
        self.num_products += 1
        super().logits(x, lm_head, out)


def opened(directory: Path, stack: ExitStack, *args, **heads) -> Pair:
    engines = build_with_head(directory, make_medusa, **heads)
    return open_pair(engines, stack, TorchMedusa(directory / "h", directory / "t"), *args)


def laws(pair: Pair, tokens: list[int], num_tokens: int) -> np.ndarray:
    """Distributions [heads, vocab] of the drafts behind tokens[:num_tokens]."""
    return pair.head.logits(pair.hidden(tokens[: num_tokens - 1])[-1]).softmax(-1).numpy()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with ExitStack() as stack:
        yield opened(tmp_path_factory.mktemp(request.param), stack, **VARIANTS[request.param])


def test_laws_of_drafts_match_torch(pair: Pair) -> None:
    """Requests at once, at places of their own: without pending drafts, with two, one that wants none, and places
    without a head, which get no draft. A second call begins anew."""
    tokens = random_tokens(5, 9, 40, 17, 6)
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    requests = [(tokens[0], 9, 0, 5), (tokens[1], 38, 37, 2), (tokens[2], 15, 3, 3), (tokens[3], 6, 0, 0)]
    for (known, num_tokens, _, wanted), (result, q) in zip(
        2 * requests, [*draft(pair, requests), *draft(pair, requests)], strict=True
    ):
        first = len(known) - num_tokens
        num_drafts = min(wanted, pair.head.num_heads - first)
        assert len(result) == len(known) + num_drafts
        if num_drafts:
            np.testing.assert_allclose(q, laws(pair, known, num_tokens)[first : first + num_drafts], atol=2e-5)


def test_a_draft_call_reads_each_head_once(tmp_path: Path) -> None:
    """And none where nobody drafts: there is no KV to bring up to date."""
    (tokens,) = random_tokens(6, 12)
    with ExitStack() as stack:
        ops: list[CountingOps] = []

        def counting() -> CountingOps:
            ops.append(CountingOps())
            return ops[-1]

        pair = opened(tmp_path, stack, torch.float32, counting, num_heads=5)
        pair.target.run([(0, tokens, 0, 12)])
        draft(pair, [(tokens, 10, 0, 3)])
        assert ops[1].num_products == 5
        draft(pair, [(tokens, 12, 0, 0)])
        assert ops[1].num_products == 5


def test_bfloat16_stays_near_torch(tmp_path: Path) -> None:
    tokens = random_tokens(8, 30, 21)
    with ExitStack() as stack:
        pair = opened(tmp_path, stack, torch.bfloat16, ReferenceOps, num_heads=5, num_layers=2)
        pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
        requests = [(t, len(t), 0, 4) for t in tokens]
        for (known, num_tokens, _, _), (_, q) in zip(requests, draft(pair, requests), strict=True):
            check_bfloat16(q, laws(pair, known, num_tokens)[:4])


def test_engines_in_float16_hold_the_same_weights(tmp_path: Path) -> None:
    found = []
    for dtype in ("bfloat16", "float16"):
        engines = build_with_head(tmp_path / dtype, make_medusa, dtype, num_heads=2, num_layers=2)
        with CudaFile.open(engines.draft_path) as file:
            found.append(MedusaWeights.load(file, torch.device("cpu"), torch.float32).tensors)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-7, rtol=0, msg=name)  # what fp16 cannot hold


def test_logits_are_counted(tmp_path: Path) -> None:
    """The logits of all places, and they are named where not even one request fits."""
    engines = build_with_head(tmp_path, make_medusa, num_heads=3)
    assert place_logits_bytes(engines.draft_path, 4) == 4 * 3 * 4 * VOCAB
    assert place_logits_bytes(engines.target_path, 4) == 0
    request = OpenRequest(engines, engines.build_config, 16, drafting=True)
    with pytest.raises(ConfigError, match=r"logits and draft probs 0.00, logits of the Medusa heads 0.00, KV caches"):
        blocks_of(request, SmallGpu(), Shard())
