"""A target and its draft head on the cuda engine, on the host, and what the head drafts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.builder.cuda_engine_file import CudaFile
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cuda.engine import load_weights, make_engine
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.gpu.decoder import Placement
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.engine.gpu.limits import GpuLimits
from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.sampling.table import SamplingTable
from tests.engine.cuda.exact_ops import ExactOps
from tests.engine.cuda.harness import WHOLE
from tests.support.block_drafter_reference import TorchBlockDrafter
from tests.support.engine_harness import Harness
from tests.support.medusa import TorchMedusa

VOCAB, NUM_LAYERS, NUM_SLOTS, MAX_DRAFT_LEN, MAX_SEQ_LEN = 320, 4, 4, 5, 128
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0)


@dataclass
class Pair:
    """layers: those whose entering hidden rows are kept. head: the published forward pass in torch. probs: where the
    draft engine keeps its q."""

    target: Harness
    draft: GpuEngine
    probs: DeviceDraftProbs
    kept: HiddenRows
    reference: ReferenceModel
    layers: tuple[int, ...]
    head: Any

    @property
    def is_medusa(self) -> bool:
        return isinstance(self.head, TorchMedusa)

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden rows [n, layers * hidden], by torch."""
        rows = self.reference.hidden_rows(tokens or [0])
        return torch.cat([rows[layer] for layer in self.layers], -1)[: len(tokens)]


def open_pair(engines: EngineDir, stack: ExitStack, head: Any, dtype=torch.float32, ops=ExactOps) -> Pair:
    """Open engines of build_with_head: by default in float32, with products summed in float64."""
    runtime, opened = HostRuntime(), []
    with CudaFile.open(engines.target_path) as file, CudaFile.open(engines.draft_path) as draft_file:
        model = draft_file.model
        layers = model.get("head", model.get("block", {"layers": (NUM_LAYERS,)}))["layers"]
        hidden = file.model["hidden_size"]
        kept = HiddenRows(runtime, layers, hidden, dtype, num_blocks=4 * NUM_SLOTS, tokens_per_block=32)
        probs = DeviceDraftProbs(runtime, WHOLE, NUM_SLOTS, MAX_DRAFT_LEN, VOCAB)
        for each in (file, draft_file):
            weights = load_weights(each, runtime.device, dtype)
            limits = GpuLimits(
                4 * NUM_SLOTS, 32, NUM_SLOTS, 128, MAX_SEQ_LEN, 128, 0 if each is file else MAX_DRAFT_LEN
            )
            options = {"hidden_rows": kept, "draft_probs": None if each is file else probs}
            engine = make_engine(weights, each.segments, Placement(ops(), runtime, WHOLE), limits, **options)
            opened.append(stack.enter_context(engine))
    target_dir = engines.path.parent / "t"
    weights = stack.enter_context(CheckpointWeights(target_dir))
    reference = ReferenceModel(load_model_config(target_dir), weights)
    return Pair(Harness(opened[0]), opened[1], probs, kept, reference, tuple(layers), head)


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
    found = pair.draft.draft(DraftBatch(batch, table.array, num_tokens, num_drafts, num_new, MAX_DRAFT_LEN)).tolist()
    drafted = []
    for slot, ((tokens, _, _, _), count) in enumerate(zip(requests, found, strict=True)):
        end = len(tokens) + count
        places = [position % MAX_DRAFT_LEN for position in range(len(tokens), end)]
        rows = (pair.probs or table.draft_probs).rows(slot)
        drafted.append((bound[slot].tokens[:end].tolist(), np.asarray(rows[places]).copy()))
    return drafted


def laws(pair: Any, tokens: list[int], num_tokens: int, first: int) -> np.ndarray:
    """Distributions [.., vocab] after tokens[:first], tokens[:first + 1] and so on, of which the target has run all
    but the last of num_tokens: beyond, a head goes on from its own outputs, Medusa has a head a place, and a block
    drafter a block, all of whose drafts stand in tokens."""
    hidden = pair.hidden(tokens[: num_tokens - 1])
    if isinstance(pair.head, TorchBlockDrafter):
        drafts = [*tokens[num_tokens:], *[0] * pair.head.num_places]  # of the rest no law is asked for
        return pair.head.logits(hidden, tokens[num_tokens - 1], drafts).softmax(-1).numpy()
    if pair.is_medusa:
        return pair.head.logits(hidden[-1])[first - num_tokens :].softmax(-1).numpy()
    features = pair.head.features(hidden)
    while True:
        outputs, logits = pair.head.forward(features, tokens[1 : len(features) + 1])
        if len(features) == len(tokens) - 1:
            return logits[first - 2 :].softmax(-1).numpy()
        features = torch.cat((features, outputs[-1:]))


def random_tokens(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


def check_bfloat16(found: np.ndarray, wanted: np.ndarray, most: float = 0.03) -> None:
    """Laws whose logits are within bf16's error of torch's, which is this share of their deviation."""
    assert np.array_equal(found == 0, wanted == 0)
    possible = wanted > 1e-4
    error = np.log(found[possible]) - np.log(wanted[possible])
    assert np.sqrt(np.square(error).mean()) < most * np.log(wanted[possible]).std()
