"""Block drafters on the CPU engine: DFlash, DFlash2 and DSpark. Their drafts' laws are those of the published forward
passes in torch, and whatever is done to them by mistake is seen."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import ConfigError, EngineFileError, InvalidArgumentError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.partition.core_set import CoreSet
from tests.engine.cuda.heads import MAX_DRAFT_LEN, NUM_LAYERS, NUM_SLOTS, VOCAB, draft, random_tokens
from tests.support.block_drafter import make_block_drafter
from tests.support.block_drafter_reference import TorchBlockDrafter
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_harness import Harness

SIZES = {"max_seq_len": 64, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128, "max_draft_len": MAX_DRAFT_LEN}
ODD = {"hidden_size": 80, "num_heads": 5, "num_kv_heads": 1, "head_dim": 18}
# Options of the target and of the drafter.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {"block_size": 6}),
    "dflash_many_layers": ({}, {"layout": "dflash_nested", "layers": (0, 1, 2, 4), "num_layers": 3, "block_size": 5}),
    "windows": ({}, {"windows": (7, 0), "block_size": 6}),
    "tied_odd_sizes": (ODD | {"tie": True}, {"block_size": 3}),
    "dspark": ({}, {"layout": "dspark", "block_size": 4}),
    "dspark_plain": ({}, {"layout": "dspark_plain", "block_size": 5}),
    "dflash2": ({}, {"layout": "dflash2", "block_size": 6, "windows": (9, 9)}),
    "speculators": ({}, {"layout": "speculators_dspark", "layers": (1, 3), "block_size": 4}),
}


@dataclass
class Pair:
    """drafter: the published forward pass in torch."""

    target: Harness
    draft: CpuEngine
    drafter: TorchBlockDrafter
    reference: ReferenceModel
    path: Path
    dirs: tuple[Path, Path]
    probs: None = None  # the sampling table has them

    def hidden(self, tokens: list[int], shift: int = 0) -> torch.Tensor:
        """The target's hidden rows [n, layers * hidden], rounded to bf16: read between its segments, which are its
        layers, and what leaves the last from torch."""
        rows, batch = self.reference.hidden_rows(tokens), self.target.batch([(0, tokens, 0, len(tokens))])
        for segment in range(NUM_LAYERS):
            self.target.engine.run_segment(batch, segment)
            if segment < NUM_LAYERS - 1:
                rows[segment + 1] = torch.from_numpy(self.target.engine.hidden_rows(len(tokens)).copy())
        layers = [min(max(0, layer + shift), NUM_LAYERS) for layer in self.drafter.layers]
        return torch.cat([rows[layer] for layer in layers], -1).bfloat16().float()

    def error(self, drafted: tuple[list[int], np.ndarray], num_tokens: int, shift: int = 0, **wrong: Any) -> float:
        """Distance of the drafts' laws from torch's, in standard deviations of its logits; inf where one is 0 and the
        other is not. shift, wrong: ways in which a drafter may be run by mistake."""
        tokens, found = drafted
        drafter = TorchBlockDrafter(*self.dirs, rounded=True, **wrong) if wrong else self.drafter
        hidden = torch.zeros(0, len(drafter.layers) * drafter.keys["hidden_size"])
        if num_tokens > 1:
            hidden = self.hidden(tokens[: num_tokens - 1], shift)
        drafts = tokens[num_tokens:] + [0] * drafter.num_places
        laws = drafter.logits(hidden, tokens[num_tokens - 1], drafts[: drafter.num_places])
        found = found[: drafter.num_places]
        wanted = laws.softmax(-1).numpy()[: len(found)]
        assert len(found)
        possible = (found > 0) & (wanted > 1e-4)
        if ((found == 0) != (wanted == 0)).sum() > 0.01 * VOCAB * len(found) or not possible.any():
            return np.inf
        logits = np.log(np.where(possible, wanted, 1.0))
        return float(
            np.sqrt(np.square((np.log(np.where(possible, found, 1.0)) - logits)[possible]).mean())
            / logits[possible].std()
        )


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    root: Path = tmp_path_factory.mktemp(request.param)
    of_target, of_drafter = VARIANTS[request.param]
    target_dir = make_checkpoint(root / "t", vocab_size=VOCAB, num_layers=NUM_LAYERS, **of_target)
    drafter_dir = make_block_drafter(root / "h", target_dir, **of_drafter)
    options = BuildOptions(target_dir, drafter_dir, root / "e", exit_layers=(1, 2, 3), **SIZES)
    built = build_engines(options)
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=2))
        target, drafter = (open_engine(path, cores, stack) for path in (built.target_path, built.draft_path))
        drafter.attach(target)
        weights = stack.enter_context(CheckpointWeights(target_dir))
        reference = ReferenceModel(load_model_config(target_dir), weights, round_to_bf16=True)
        in_torch = TorchBlockDrafter(drafter_dir, target_dir, rounded=True)
        yield Pair(Harness(target), drafter, in_torch, reference, built.draft_path, (drafter_dir, target_dir))


def open_engine(path, cores, stack, max_num_tokens=128, num_blocks=4 * NUM_SLOTS):
    sizes = {"tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": max_num_tokens}
    return stack.enter_context(CpuEngine.open(path, cores, num_blocks=num_blocks, **sizes))


CLOSE = 0.03


def test_laws_of_drafts_match_torch(pair):
    """Requests at once: a prompt that is new, one of which rows are there, one whose block crosses KV blocks, and one
    that drafts nothing. Beyond the block's places there are no drafts."""
    tokens = random_tokens(5, 9, 40, 31, 6)
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)])
    requests = [(tokens[0], 9, 0, 5), (tokens[1][:35], 35, 20, 2), (tokens[2], 31, 0, 5), (tokens[3], 6, 0, 0)]
    for (known, num_tokens, _, wanted), drafted in zip(requests, draft(pair, requests), strict=True):
        wanted = min(wanted, pair.drafter.num_places)
        assert len(drafted[0]) == len(known) + wanted
        if wanted:
            assert pair.error(drafted, num_tokens) < CLOSE


def test_the_first_tokens_of_a_text_have_little_context(pair):
    (tokens,) = random_tokens(8, 3)
    pair.target.run([(0, tokens, 0, 3)])
    for num_tokens in (1, 2):
        (drafted,) = draft(pair, [(tokens[:num_tokens], num_tokens, 0, 3)])
        assert pair.error(drafted, num_tokens) < CLOSE


def test_mistakes_are_seen(pair):
    (tokens,) = random_tokens(9, 24)
    pair.target.run([(0, tokens, 0, 24)])
    (drafted,) = draft(pair, [(tokens, 24, 0, 5)])
    assert pair.error(drafted, 24) < CLOSE
    wrong: list[dict[str, Any]] = [{"shift": 1}, {"shift": -1}, {"position_shift": 1}, {"position_shift": -1}]
    wrong += [{"norms_context": True}, {"first_slot": 1 - pair.drafter.first_slot}, {"causal": True}]
    for mistake in wrong:
        assert pair.error(drafted, 24, **mistake) > 3 * CLOSE, mistake


def test_a_draft_does_not_depend_on_the_others_or_on_chunks(pair):
    """Bit for bit: alone in one call, or next to others after chunks of the prompt in several, and whatever was drafted
    in between, and however many drafts are wanted."""
    tokens = random_tokens(7, 30, 21, 5)
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    ((_, alone),) = draft(pair, [(tokens[0][:28], 28, 0, 3)])
    draft(pair, [(tokens[0][:7], 7, 0, 2), (tokens[1][:20], 20, 0, 0)])
    draft(pair, [(tokens[0][:19], 19, 6, 0)])
    requests = [(tokens[0][:28], 28, 19, 3), (tokens[1], 21, 20, 5), (tokens[2][:4], 4, 0, 2)]
    assert np.array_equal(draft(pair, requests)[0][1], alone)
    ((_, fewer),) = draft(pair, [(tokens[0][:28], 28, 27, 1)])
    assert np.array_equal(fewer, alone[:1])


def test_a_reused_prefix_gives_the_same_drafts(pair):
    """Bit for bit: a request that shares the first block with one that drafted there, and one that runs all itself."""
    (tokens,) = random_tokens(11, 41)
    pair.target.run([(0, tokens, 0, 40)])
    draft(pair, [(tokens[:30], 30, 0, 4)])  # a block that ends in the next one
    ((_, alone),) = draft(pair, [(tokens[:40], 40, 29, 3)])
    table = pair.target.block_table
    own = table[1, 0]
    table[1, 0] = table[0, 0]
    try:
        pair.target.run([(1, tokens, 32, 40)])
        ((_, reused),) = draft_in(pair, 1, (tokens[:40], 40, 32, 3))
    finally:
        table[1, 0] = own
    assert np.array_equal(alone, reused)


def draft_in(pair, slot, request):
    """Draft for one request in this slot."""
    others = [([1], 1, 0, 0)] * slot
    return draft(pair, [*others, request])[slot:]


def test_passes_of_few_rows_draft_the_same(pair):
    """A pass of the drafter has rows for one block only, and the requests take turns."""
    tokens = random_tokens(6, 12, 7, 9)
    requests = [(t, len(t), len(t) - 1, 4) for t in tokens]
    context = [(t[:-1], len(t) - 1, 0, 0) for t in tokens]
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    draft(pair, context)
    wanted = draft(pair, requests)
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=1))
        paths = (pair.path.parent.parent / "target" / pair.path.name, pair.path)
        target = open_engine(paths[0], cores, stack)
        small = open_engine(paths[1], cores, stack, max_num_tokens=2 * pair.drafter.block_size - 1)
        small.attach(target)
        other = Pair(Harness(target), small, pair.drafter, pair.reference, pair.path, pair.dirs)
        other.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
        for slot, request in enumerate(context):
            for first in range(0, request[1], 2):
                rows = [([1], 1, 0, 0)] * slot + [(request[0][: first + 2], min(first + 2, request[1]), first, 0)]
                draft(other, rows)
        for found, before in zip(draft(other, requests), wanted, strict=True):
            assert found[0] == before[0]
            assert np.array_equal(found[1], before[1])


def test_what_a_drafter_cannot_run_is_refused(pair, tmp_path):
    (tokens,) = random_tokens(3, 12)
    pair.target.run([(0, tokens, 0, 12)])
    with pytest.raises(InvalidArgumentError):  # pending drafts cannot be extended
        draft(pair, [(tokens, 10, 0, 2)])
    with pytest.raises(InvalidArgumentError):
        pair.draft.forward(pair.target.batch([(0, tokens, 0, 12)]))
    other_dir = make_checkpoint(tmp_path / "t", vocab_size=VOCAB, hidden_size=128)
    other = build_engines(BuildOptions(other_dir, None, tmp_path / "e", **SIZES)).target_path
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=1))
        lonely, target = (open_engine(path, cores, stack) for path in (pair.path, other))
        with pytest.raises(EngineFileError, match=r"does not fit this target: .*; rebuild it for this target"):
            lonely.attach(target)
        with pytest.raises(ConfigError, match=r"max_num_tokens is 2; it must be at least the .* block_size"):
            open_engine(pair.path, cores, stack, max_num_tokens=2)
