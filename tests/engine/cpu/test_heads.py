"""Draft heads on the CPU engine: EAGLE-3, Medusa and an MTP layer. Their drafts' laws are those of the published
forward passes in torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import EngineFileError, InvalidArgumentError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.partition.core_set import CoreSet
from tests.engine.cuda.heads import MAX_DRAFT_LEN, NUM_LAYERS, NUM_SLOTS, VOCAB, draft, laws, random_tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import TorchHead, make_deepspec_head, make_head, make_speculators_head, torch_head
from tests.support.engine_harness import Harness
from tests.support.medusa import TorchMedusa, make_medusa
from tests.support.mtp import TorchMtp, make_mimo

SIZES = {"max_seq_len": 64, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128, "max_draft_len": MAX_DRAFT_LEN}
ODD = {"hidden_size": 70, "num_heads": 5, "num_kv_heads": 1, "head_dim": 18}
EAGLE31 = {"fc_norm": True, "norm_output": True, "layers": (1, 2, 3)}
SPECULATORS = {"make": make_speculators_head, "norm_before_fc": True, "norm_output": True}
# Options of the target and of the head; of an MTP layer, whether it reads after the target's final norm. says: the
# option of the build that tells what norm_output means.
VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "safeailab": ({}, {}),
    "specforge": ({}, {"naming": "layers.0", "layers": (1, 2, 4), "own_embedding": False}),
    "prefixed": ({}, {"prefix": "model.", "layers": (0, 3), "norm_before_residual": True}),
    "whole_vocabulary": ({}, {"draft_vocab_size": None, "layers": (2,)}),
    "odd_sizes": (ODD, {"draft_vocab_size": 33}),
    "eagle31": ({}, EAGLE31 | {"says": "fed"}),
    "eagle31_of_specforge": ({}, EAGLE31 | {"says": "head"}),
    "eagle31_odd_sizes": (ODD, EAGLE31 | {"says": "fed", "num_layers": 2, "prefix": "model."}),
    "several_layers": ({}, {"num_layers": 3}),
    "speculators": ({}, SPECULATORS | {"num_layers": 2, "norm_before_residual": True, "layers": (1, 2, 3)}),
    "speculators_window": (
        {},
        SPECULATORS
        | {
            "num_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
            "qk_norm": True,
        },
    ),
    "deepspec": ({}, {"make": make_deepspec_head, "layers": (0, 1, 2, 3)}),
    "medusa": ({}, {"num_heads": 4}),
    "medusa_deep": ({}, {"num_heads": 3, "num_layers": 2, "biases": False}),
    "medusa_odd_sizes": (ODD, {"num_heads": 5}),
    "mtp": ({}, False),
    "mtp_normed": ({}, True),
    "mtp_odd_sizes": (ODD | {"tie": True}, False),
}


@dataclass
class Pair:
    """head: the published forward pass in torch."""

    target: Harness
    draft: CpuEngine
    head: Any
    reference: ReferenceModel
    layers: tuple[int, ...]
    path: Path
    probs: None = None  # the sampling table has them

    @property
    def is_medusa(self) -> bool:
        return isinstance(self.head, TorchMedusa)

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden rows [n, layers * hidden], rounded to bf16: read between its segments, which are its
        layers, and what leaves the last from torch."""
        rows, batch = self.reference.hidden_rows(tokens), self.target.batch([(0, tokens, 0, len(tokens))])
        for segment in range(NUM_LAYERS):
            self.target.engine.run_segment(batch, segment)
            if segment < NUM_LAYERS - 1:
                rows[segment + 1] = torch.from_numpy(self.target.engine.hidden_rows(len(tokens)).copy())
        return torch.cat([rows[layer] for layer in self.layers], -1).bfloat16().float()

    def check(self, drafted: tuple[list[int], np.ndarray], num_tokens: int, first: int) -> None:
        """q is 0 where a token cannot be drafted, and within bf16 error elsewhere."""
        tokens, found = drafted
        wanted = laws(self, tokens[:-1], num_tokens, first)[: len(found)]
        assert np.array_equal(found == 0, wanted == 0)
        logits = [np.log(np.where(law > 0, law, 1.0)) for law in (found, wanted)]
        possible = wanted > 1e-4
        assert possible.any(-1).all()
        error = (logits[0] - logits[1])[possible]
        limit = 0.04 if self.is_medusa or self.head.config.get("num_hidden_layers", 1) > 1 else 0.02
        assert np.sqrt(np.square(error).mean()) < limit * logits[1][possible].std()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    root: Path = tmp_path_factory.mktemp(request.param)
    of_target, of_head = VARIANTS[request.param]
    kind, layers, head_dir = request.param.partition("_")[0], (NUM_LAYERS,), root / "h"
    make = make_mimo if kind == "mtp" else make_checkpoint
    target_dir = make(root / "t", vocab_size=VOCAB, num_layers=NUM_LAYERS, **of_target)
    options: dict[str, Any] = {"draft_checkpoint_dir": head_dir}
    if kind == "mtp":
        options = {"draft_checkpoint_dir": None, "mtp": True, "mtp_reads_normed": of_head}
        head = TorchMtp(target_dir, of_head)
    elif kind == "medusa":
        make_medusa(head_dir, target_dir, **of_head)
        head = TorchMedusa(head_dir, target_dir)
    else:
        of_head = {"layers": (0, 1, 3), "make": make_head, "says": ""} | of_head
        make_eagle3, says = of_head.pop("make"), of_head.pop("says")
        make_eagle3(head_dir, target_dir, **of_head)
        options["eagle3_norm_output"] = says
        head, layers = torch_head(head_dir, target_dir), of_head["layers"]
        head.feeds_normed &= says != "head"
    built = build_engines(BuildOptions(target_dir, output_dir=root / "e", exit_layers=(1, 2, 3), **options, **SIZES))
    sizes = {"num_blocks": 4 * NUM_SLOTS, "tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 128}
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=2))
        target = stack.enter_context(CpuEngine.open(built.target_path, cores, **sizes))
        draft = stack.enter_context(CpuEngine.open(built.draft_path, cores, **sizes))
        draft.attach(target)
        weights = stack.enter_context(CheckpointWeights(target_dir))
        reference = ReferenceModel(load_model_config(target_dir), weights, round_to_bf16=True)
        yield Pair(Harness(target), draft, head, reference, layers, built.draft_path)


def test_laws_of_drafts_match_torch(pair):
    """Requests at once: a prompt that is new, one of which rows are there, with pending drafts and without, and one
    that drafts nothing. Places without a head get no draft."""
    tokens = random_tokens(5, 9, 40, 17, 6)
    if not pair.is_medusa and pair.head.config["draft_vocab_size"] < VOCAB:
        assert 0 < (laws(pair, tokens[0], 9, 9) == 0).sum() < VOCAB
    pair.target.run([(slot, t, 0, len(t) - 1) for slot, t in enumerate(tokens)])
    # of the second the first 35 are committed and 20 run, of the third all but two
    draft(pair, [([1], 1, 0, 0), (tokens[1][:20], 20, 0, 0)])
    requests = [(tokens[0], 9, 0, 5), (tokens[1][:37], 35, 20, 2), (tokens[2], 16, 0, 4), (tokens[3], 6, 0, 0)]
    for (known, num_tokens, _, wanted), drafted in zip(requests, draft(pair, requests), strict=True):
        if pair.is_medusa:
            wanted = min(wanted, pair.head.num_heads - (len(known) - num_tokens))
        assert len(drafted[0]) == len(known) + wanted
        if wanted:
            pair.check(drafted, num_tokens, len(known))


def test_rows_of_pending_drafts_are_run_again_with_the_targets_rows(pair):
    (tokens,) = random_tokens(6, 12)
    pair.target.run([(0, tokens, 0, 11)])
    ((result, _),) = draft(pair, [(tokens, 12, 0, 3)])
    pair.target.run([(0, result, 11, 14)])
    (drafted,) = draft(pair, [(result[:14], 14, 12, 3)])
    pair.check(drafted, 14, 14)


def test_a_row_does_not_depend_on_the_others_or_on_chunks(pair):
    """Bit for bit: alone in one call, or beside others after chunks of the prompt in several."""
    tokens = random_tokens(7, 30, 21, 5)
    pair.target.run([(slot, t, 0, len(t)) for slot, t in enumerate(tokens)])
    ((_, alone),) = draft(pair, [(tokens[0], 28, 0, 3)])
    draft(pair, [(tokens[0][:7], 7, 0, 0), (tokens[1][:20], 20, 0, 0)])
    draft(pair, [(tokens[0][:19], 19, 7, 0)])
    beside = draft(pair, [(tokens[0], 28, 19, 3), (tokens[1], 21, 20, 5), (tokens[2], 4, 0, 2)])
    assert np.array_equal(beside[0][1], alone)


def otherwise(pair: Pair, change: Callable[[TorchHead], None]) -> Pair:
    head = TorchHead(pair.head.weights, pair.head.config, pair.head.embedding)
    head.feeds_normed = pair.head.feeds_normed
    change(head)
    return replace(pair, head=head)


def without(*parts: str) -> Callable[[Pair], Pair]:
    def change(head: TorchHead) -> None:
        head.weights = {name: value for name, value in head.weights.items() if not any(part in name for part in parts)}

    return lambda pair: otherwise(pair, change)


def configured(**keys: Any) -> Callable[[Pair], Pair]:
    return lambda pair: otherwise(pair, lambda head: head.config.update(keys))


def fed_otherwise(pair: Pair) -> Pair:
    return otherwise(pair, lambda head: setattr(head, "feeds_normed", not head.feeds_normed))


def normed_by_row(pair: Pair) -> Pair:
    """The one norm of all rows as a norm of each."""

    def change(head: TorchHead) -> None:
        parts = head.weights.pop("input_norm.weight").chunk(len(pair.layers))
        head.weights |= {f"fc_norm.{i}.weight": part for i, part in enumerate(parts)}

    return otherwise(pair, change)


def layers_off_by(step: int) -> Callable[[Pair], Pair]:
    return lambda pair: replace(pair, layers=tuple(layer + step for layer in pair.layers))


CONTROLS = {
    "eagle31": {
        "no_fc_norm": without("fc_norm"),
        "fed_before_the_norm": fed_otherwise,
        "layers_before": layers_off_by(-1),
        "layers_behind": layers_off_by(1),
    },
    "eagle31_of_specforge": {"fed_after_the_norm": fed_otherwise},
    "speculators": {
        "no_norm": without("input_norm"),
        "norms_by_row": normed_by_row,
        "fed_before_the_norm": fed_otherwise,
        "one_layer": configured(num_hidden_layers=1),
        "residual_before_the_norm": configured(norm_before_residual=False),
    },
    "speculators_window": {
        "no_window": configured(layer_types=[]),
        "other_layer": configured(layer_types=["sliding_attention", "full_attention"]),
        "window_of_nine": configured(sliding_window=9),
    },
    "deepspec": {"no_qk_norm": without("q_norm", "k_norm"), "layers_entered": layers_off_by(1)},
}


@pytest.mark.parametrize(
    ("pair", "wrong"),
    [pytest.param(kind, wrong, id=f"{kind}-{name}") for kind, all_ in CONTROLS.items() for name, wrong in all_.items()],
    indirect=["pair"],
)
def test_any_other_wiring_gives_other_laws(pair, wrong):
    """So the comparison with torch would find each of these mistakes."""
    (tokens,) = random_tokens(8, 30)
    pair.target.run([(0, tokens, 0, 30)])
    (drafted,) = draft(pair, [(tokens, 30, 0, 4)])
    pair.check(drafted, 30, 30)
    with pytest.raises(AssertionError):
        wrong(pair).check(drafted, 30, 30)


def test_a_head_without_its_target_or_with_another_runs_nothing(pair, tmp_path):
    sizes = {"tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 8}
    other_dir = make_checkpoint(tmp_path / "t", vocab_size=VOCAB, hidden_size=128)
    other = build_engines(BuildOptions(other_dir, None, tmp_path / "e", **SIZES)).target_path
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=1))
        lonely, target = (
            stack.enter_context(CpuEngine.open(path, cores, num_blocks=4, **sizes)) for path in (pair.path, other)
        )
        with pytest.raises(InvalidArgumentError):
            lonely.forward(pair.target.batch([(0, [5, 6], 0, 2)]))
        with pytest.raises(EngineFileError, match=r"does not fit this target: .*; rebuild it for this target"):
            lonely.attach(target)


def test_medusa_heads_have_no_kv(pair):
    """Their memory does not grow with the cache."""
    sizes = {"tokens_per_block": 32, "max_batch_size": NUM_SLOTS, "max_num_tokens": 8}
    with CoreSet(num_threads=1) as cores:
        found = []
        for num_blocks in (4, 400):
            with CpuEngine.open(pair.path, cores, num_blocks=num_blocks, **sizes) as engine:
                found.append(engine.memory_bytes)
    assert (found[0] == found[1]) == pair.is_medusa
