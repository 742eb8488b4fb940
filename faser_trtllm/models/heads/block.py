"""A block drafter's checkpoint: DFlash, DFlash2 or DSpark, in the published layouts.

The drafter's layers attend to hidden rows of the target, and one pass gives the distributions of a whole block of
drafts. The settings of blocks are in config.json under dflash_config (z-lab, SpecForge) or at its top (DeepSpec,
speculators); speculators has the settings of the layers under transformer_layer_config.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import Fields, ModelConfig, architectures_of, parse_model_config, read_json
from faser_trtllm.models.fused import fused_tensors
from faser_trtllm.models.heads.tensors import HeadTensors
from faser_trtllm.models.heads.torch_file import HeadFiles
from faser_trtllm.models.weights import Weights

SLOTS = {"anchor": 0, "mask": 1}
"""Index of the first slot that drafts, by value of --block_slots."""
MAX_BLOCK_SIZE = 64
_SOURCE = "config.json"
_KINDS = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# The first slot that drafts, by architecture, if config.json does not say; None: files differ.
_FIRST_SLOTS = {
    "DFlashDraftModel": 1,
    "DFlash2DraftModel": 1,
    "Qwen3DSparkModel": 0,
    "DSparkDraftModel": None,
    "DFlashSpeculator": 1,
    "DSparkSpeculator": None,
}
_UNCLEAR = {
    "DSparkDraftModel": "SpecForge trains a block's first slot to draft, but its own generation begins at the second",
    "DSparkSpeculator": "its default was false (drafts begin at a block's second slot) and is true now (the first)",
}
_COMMON = {"block_size", "causal", "mask_token_id", "projector_type", "query_zero_predicts_next", "sample_from_anchor"}
_COMMON |= {"target_layer_ids"}
_DFLASH2 = {"conv_group_size", "conv_kernel_size", "final_logit_softcapping", "input_embedding_scale"}
_DFLASH2 |= {"output_multiplier", "selector_rank", "selector_top_k"}
_DSPARK = {"attention_mode", "confidence_head_alpha", "confidence_head_with_markov", "enable_confidence_head"}
_DSPARK |= {"markov_head_type", "markov_rank"}
_KEYS = {"DFlashDraftModel": _COMMON, "DFlash2DraftModel": _COMMON | _DFLASH2, "DSparkDraftModel": _COMMON | _DSPARK}
"""The known keys of dflash_config by architecture."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter. Sizes of 0 turn off markov, selector, conv and logit_softcap.

    model: the drafter's layers, with the target's vocab_size. tie_word_embeddings means that the drafter shares the
        target's embedding and LM head, and that these are one matrix.
    layers: the target's layers whose inputs are the features, ascending; num_layers means the last layer's output.
    block_size: rows of a block: the last committed token, then masks.
    first_slot: the first row that drafts. 0: a row predicts the token after its position; 1: the one at its position.
    windows: per layer, tokens that a row attends to, including itself; 0 for all.
    causal: per layer, True if rows of a block do not attend to later ones.
    markov_rank: rank of the matrices whose product adds logits for the preceding draft (DSpark).
    selector_rank, selector_top_k: rank and number of candidates that the preceding draft scores (DFlash2).
    conv_taps, conv_group_size: convolutions over the block's rows next to each sublayer (DFlash2).
    """

    model: ModelConfig
    target_hidden_size: int
    layers: tuple[int, ...]
    block_size: int
    first_slot: int
    mask_token_id: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    markov_rank: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_taps: int = 0
    conv_group_size: int = 0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0

    @property
    def num_features(self) -> int:
        """Length of one context row: the target's hidden rows of all layers, concatenated."""
        return len(self.layers) * self.target_hidden_size

    @property
    def num_places(self) -> int:
        return self.block_size - self.first_slot


def is_block(checkpoint_dir: Path) -> bool:
    """Return True if config.json describes a block drafter; CheckpointError if unreadable."""
    data = read_json(checkpoint_dir / _SOURCE)
    named = any(kind in name.lower() for name in architectures_of(data) for kind in _KINDS)
    return named or "dflash_config" in data or data.get("speculators_model_type") in tuple(_KINDS)


class BlockWeights(HeadTensors):
    """Tensors of a drafter."""

    def __init__(self, checkpoint: HeadFiles, target: Weights, tied: bool) -> None:
        super().__init__("block drafter", checkpoint, _our_name, target, tied)


def load_block_config(
    checkpoint_dir: Path, weights: BlockWeights, target: ModelConfig, layers: Sequence[int] = (), slots: str = ""
) -> BlockConfig:
    """Read a drafter's config.json. layers and slots (a key of SLOTS), if given, override what it says.

    Raises CheckpointError for a key that is missing, ambiguous, not supported, or does not fit the target.
    """
    data = read_json(checkpoint_dir / _SOURCE)
    name = _architecture(data)
    nested = data.get("transformer_layer_config" if name.endswith("Speculator") else "dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    _check_keys(name, data, nested)
    fields = Fields(data | nested, _SOURCE)
    config = _read(name, fields, weights, target, tuple(layers), slots)
    _check_target(fields, weights, config, target)
    weights.check(expected_shapes(config), len(config.layers), r"confidence_head\..*")
    return config


def _architecture(data: dict[str, Any]) -> str:
    kind = data.get("speculators_model_type")
    if kind in tuple(_KINDS):  # architectures may name another class, from training
        return _KINDS[kind]
    found = next(iter(architectures_of(data)), None)
    if found is None or found not in _FIRST_SLOTS:
        raise CheckpointError(
            f"{_SOURCE}: architecture {found!s:.80} of a block drafter is not supported; supported are "
            f"{', '.join(_FIRST_SLOTS)}"
        )
    return found


def _check_keys(name: str, data: dict[str, Any], nested: dict[str, Any]) -> None:
    if name not in _KEYS:
        return
    for key in nested:
        if key not in _KEYS[name]:
            raise CheckpointError(f"{_SOURCE}: dflash_config.{key:.80} of a {name} is not known, so it cannot be run")
    kind = nested.get("projector_type")
    if kind not in (None, "dspark" if name == "DSparkDraftModel" else "dflash"):
        raise CheckpointError(f"{_SOURCE}: projector_type is {kind!r:.80}, which is not supported of a {name}")
    outer, inner = data.get("block_size"), nested.get("block_size")
    if None not in (outer, inner) and outer != inner:
        raise CheckpointError(
            f"{_SOURCE}: block_size is {outer!r:.80} at the top and {inner!r:.80} in dflash_config; leave the wrong "
            "one out"
        )


def _read(
    name: str, fields: Fields, weights: BlockWeights, target: ModelConfig, layers: tuple[int, ...], slots: str
) -> BlockConfig:
    tied = target.tie_word_embeddings and not weights.has_embedding and not weights.has_head
    model = _model(fields, target, tied)
    first_slot = _first_slot(name, fields, slots)
    block_size = fields.integer("block_size", minimum=first_slot + 1, maximum=MAX_BLOCK_SIZE)
    mask = fields.integer("mask_token_id", minimum=0)
    if mask >= target.vocab_size:
        raise CheckpointError(
            f"{_SOURCE}: mask_token_id is {mask}, beyond the embedding of the target's {target.vocab_size} tokens; use "
            "the drafter that was trained for this target"
        )
    windows, causal = _attention(fields, model.num_layers, block_size)
    found: dict[str, Any] = {}
    if name == "DFlash2DraftModel":
        found = _dflash2(fields, model, block_size)
    elif fields.integer("markov_rank", default=0, minimum=0):
        kind = fields.data.get("markov_head_type", "vanilla")
        if kind != "vanilla":
            raise CheckpointError(f"{_SOURCE}: markov_head_type is {kind!r:.80}, only 'vanilla' is supported")
        found = {"markov_rank": fields.integer("markov_rank")}
    return BlockConfig(
        model,
        target.hidden_size,
        _layers(fields, layers, target.num_layers),
        block_size,
        first_slot,
        mask,
        windows,
        causal,
        **found,
    )


def _model(fields: Fields, target: ModelConfig, tied: bool) -> ModelConfig:
    """Return the configuration of the drafter's layers, which are Qwen3 layers whatever the target is."""
    own = {"max_position_embeddings": target.max_position_embeddings} | fields.data
    rope = own.get("rope_scaling") or own.get("rope_parameters")
    if own.get("rope_theta") is None and not (isinstance(rope, dict) and rope.get("rope_theta") is not None):
        raise CheckpointError(f"{_SOURCE}: rope_theta is missing, and engines differ in its default; add it")
    if own.get("is_neox_style") not in (None, True):
        raise CheckpointError(f"{_SOURCE}: is_neox_style is {own['is_neox_style']!r:.80}, only true is supported")
    own |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tied, "use_sliding_window": False}
    own["layer_types"] = None  # _attention() reads the windows
    return parse_model_config(own, _SOURCE)


def _first_slot(name: str, fields: Fields, slots: str) -> int:
    if slots:
        return SLOTS[slots]
    for key in ("sample_from_anchor", "query_zero_predicts_next"):
        if fields.data.get(key) is not None:
            return SLOTS["anchor" if fields.boolean(key, default=False) else "mask"]
    found = _FIRST_SLOTS[name]
    if found is None:
        raise CheckpointError(
            f"{_SOURCE}: sample_from_anchor of a {name} is missing, and {_UNCLEAR[name]}; say which with --block_slots "
            "anchor (the first) or --block_slots mask (the second)"
        )
    return found


def _layers(fields: Fields, wanted: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs are the features. wanted: the user's choice, () for config.json's."""
    left, entered = fields.data.get("target_layer_ids"), fields.data.get("aux_hidden_state_layer_ids")
    what, said = ("--eagle3_layers", list(wanted)) if wanted else (f"{_SOURCE}: aux_hidden_state_layer_ids", entered)
    found = said
    if said is None:
        what, said, found = f"{_SOURCE}: target_layer_ids", left, left
        if isinstance(left, list):  # these number layers by their outputs; -1: the embedding
            found = [layer + 1 if type(layer) is int else layer for layer in left]
    if said is None:
        raise CheckpointError(
            f"{what} is missing, and no formula fits all drafters; name the layers whose inputs it reads "
            "with --eagle3_layers"
        )
    if (
        not isinstance(found, (list, tuple))
        or not found
        or not all(type(layer) is int and 0 <= layer <= num_layers for layer in found)
        or any(a >= b for a, b in itertools.pairwise(found))
    ):
        first = -1 if said is left and not wanted else 0
        raise CheckpointError(
            f"{what} is {said!r:.80}; it must name layers of the target that rise from {first} to {num_layers + first}"
        )
    return tuple(found)


def _attention(fields: Fields, num_layers: int, block_size: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return windows and causality per layer, as in vLLM: a sliding layer is causal unless a key disables it."""
    data, slides = fields.data, fields.boolean("use_sliding_window", default=False)
    kinds = data.get("layer_types")
    if kinds is None:  # the default of transformers
        first = fields.integer("max_window_layers", default=28, minimum=0) if slides else num_layers
        kinds = [_SLIDING if i >= first else _FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise CheckpointError(
            f"{_SOURCE}: layer_types is {kinds!r:.80}; it must name {_FULL} or {_SLIDING} for each of the {num_layers} "
            "layers"
        )
    window = 0
    if _SLIDING in kinds:
        if not slides:
            raise CheckpointError(
                f"{_SOURCE}: layer_types has {_SLIDING} but use_sliding_window is false, so engines differ in whether "
                "there is a window; correct one of them"
            )
        window = fields.integer("sliding_window", minimum=block_size)
    causal: list[bool] = [kind == _SLIDING for kind in kinds]
    if fields.boolean("sliding_window_non_causal", default=False):
        causal = [False] * num_layers
    for key in ("causal", "is_causal"):  # the last one wins
        if data.get(key) is not None:
            causal = [fields.boolean(key, default=False)] * num_layers
    return tuple(window if kind == _SLIDING else 0 for kind in kinds), tuple(causal)


def _dflash2(fields: Fields, model: ModelConfig, block_size: int) -> dict[str, Any]:
    group = fields.integer("conv_group_size")
    if model.hidden_size % group:
        raise CheckpointError(
            f"{_SOURCE}: hidden_size {model.hidden_size} is not a multiple of conv_group_size {group}"
        )
    return {
        "selector_rank": fields.integer("selector_rank"),
        "selector_top_k": fields.integer("selector_top_k", maximum=model.vocab_size - 1),
        "conv_taps": fields.integer("conv_kernel_size", maximum=block_size),
        "conv_group_size": group,
        "logit_softcap": fields.number("final_logit_softcapping", default=None) or 0.0,
        "logit_scale": fields.number("output_multiplier", default=1.0),
        "embedding_scale": fields.number("input_embedding_scale", default=1.0),
    }


def _check_target(fields: Fields, weights: BlockWeights, config: BlockConfig, target: ModelConfig) -> None:
    wanted = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
    }
    for key, value in wanted.items():
        found = fields.data.get(key)
        if found is not None and found != value:
            raise CheckpointError(
                f"{_SOURCE}: {key} of the block drafter is {found!r:.80}, the target's is {value}; use the drafter "
                "that was trained for this target"
            )
    hidden = config.model.hidden_size
    if hidden != target.hidden_size and not (weights.has_embedding and weights.has_head):
        raise CheckpointError(
            f"the block drafter lacks embed_tokens or lm_head, and its hidden_size {hidden} is not the target's "
            f"({target.hidden_size}), so it cannot share the target's"
        )


def expected_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Return {our name: shape} of every tensor that a drafter has or shares with its target."""
    block = dataclasses.asdict(config) | {"num_features": config.num_features}
    sizes = dataclasses.asdict(config.model) | {"tied": config.model.tie_word_embeddings, "block": block}
    return {name: shape for parts in fused_tensors(sizes).values() for name, shape in parts}


def _our_name(name: str) -> str:
    name = name.removeprefix("logit_head.")  # early files of SpecForge
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name
