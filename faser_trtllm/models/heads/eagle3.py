"""An EAGLE-3 head's checkpoint (arXiv 2503.01840) in the layouts that are published.

Names: SafeAILab's `midlayer.*` and SpecForge's, vLLM's and TensorRT-LLM's `layers.0.*`, each with or without `model.`
before them. config.json: flat, or with the layer under `transformer_layer_config` (speculators). A head without its own
embedding takes the target's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig, architectures_of, parse_model_config, read_json
from faser_trtllm.models.heads.torch_file import HeadFiles
from faser_trtllm.models.weights import DerivedWeights, Weights, check_shapes
from faser_trtllm.models.weights import expected_shapes as decoder_shapes

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_SOURCE = "config.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Config:
    """model: of the head's one layer; its vocab_size is the target's. layers: those of the target whose entering hidden
    rows are the features, ascending; the target's num_layers: what leaves the last."""

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...]
    norm_before_residual: bool
    fc_bias: bool

    @property
    def num_features(self) -> int:
        return len(self.layers) * self.target_hidden_size


def is_eagle3(checkpoint_dir: Path) -> bool:
    """True if config.json says so: by its architecture, or by a draft vocabulary; CheckpointError if unreadable."""
    data = read_json(checkpoint_dir / _SOURCE)
    named = any("eagle3" in name.lower() for name in architectures_of(data))
    return named or "draft_vocab_size" in data or data.get("speculators_model_type") == "eagle3"


class Eagle3Weights(DerivedWeights):
    """Tensors of a head under our names: `fc`, `model.layers.0.*`, `hidden_norm` and so on, as a decoder's where a
    decoder has them. What the head shares with its target comes from `target`."""

    def __init__(self, checkpoint: HeadFiles, target: Weights) -> None:
        """CheckpointError for a tensor that no layout has."""
        self._checkpoint = checkpoint
        self._target = target
        self._names: dict[str, str] = {}
        for name in checkpoint:
            ours = _our_name(name)
            if ours in self._names:
                raise CheckpointError(f"tensors {self._names[ours]} and {name} of the EAGLE-3 head are the same one")
            self._names[ours] = name
        self.has_embedding = _EMBEDDING in self._names
        self.has_head = _HEAD in self._names
        self.has_target_ids = "d2t" in self._names
        self.has_fc_bias = "fc.bias" in self._names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def names(self) -> Sequence[str]:
        """Our names of the checkpoint's tensors."""
        return tuple(self._names)

    def target_ids(self, draft_vocab_size: int, vocab_size: int) -> npt.NDArray[np.int32] | None:
        """Token ids of the head's outputs [draft_vocab_size]: i + d2t[i]; None: the same ids. CheckpointError for ids
        that the target does not have, or has twice."""
        if not self.has_target_ids:
            return None
        offsets = self._checkpoint.integers(self._names["d2t"], (draft_vocab_size,))
        ids = np.arange(draft_vocab_size) + offsets
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if wrong.size:
            raise CheckpointError(
                f"d2t maps output {wrong[0]} of the EAGLE-3 head to token {ids[wrong[0]]}, the target's vocabulary has "
                f"{vocab_size}"
            )
        if np.unique(ids).size < ids.size:
            raise CheckpointError("d2t maps two outputs of the EAGLE-3 head to one token; fetch the checkpoint again")
        return ids.astype(np.int32)

    def source(self, name: str) -> tuple[Weights, str]:
        if name in self._names:
            return self._checkpoint, self._names[name]
        if name in (_EMBEDDING, _HEAD):
            return self._target, name
        return self._checkpoint, name.removeprefix("model.")  # which raises


def load_eagle3_config(
    checkpoint_dir: Path, weights: Eagle3Weights, target: ModelConfig, layers: Sequence[int] = ()
) -> Eagle3Config:
    """Read config.json of a head for a target; layers: those entered, where the user names them.

    Raises CheckpointError in one sentence for what is missing, not supported, or does not fit the target.
    """
    data = read_json(checkpoint_dir / _SOURCE)
    nested = data.get("transformer_layer_config")
    own = data | nested if isinstance(nested, dict) else data
    own = {"num_hidden_layers": 1, "max_position_embeddings": target.max_position_embeddings} | own
    own |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    own.pop("sliding_window", None)
    model = parse_model_config(own, _SOURCE)
    if model.num_layers != 1:
        raise CheckpointError(f"{_SOURCE}: num_hidden_layers is {model.num_layers}, an EAGLE-3 head has 1")
    if data.get("norm_before_fc"):
        raise CheckpointError(f"{_SOURCE}: norm_before_fc is set, only EAGLE-3 heads without that norm are supported")
    if _eagle_config(data).get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{_SOURCE}: eagle_config.use_aux_hidden_state is false, only heads that read hidden rows of several "
            "layers are supported"
        )
    if model.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{_SOURCE}: vocab_size of the EAGLE-3 head is {model.vocab_size}, the target has {target.vocab_size}; use "
            "the head that was trained for this target"
        )
    draft_vocab_size = data.get("draft_vocab_size") or model.vocab_size
    if not isinstance(draft_vocab_size, int) or not 0 < draft_vocab_size <= model.vocab_size:
        raise CheckpointError(
            f"{_SOURCE}: draft_vocab_size is {draft_vocab_size!r}, it must be from 1 to vocab_size ({model.vocab_size})"
        )
    hidden = data.get("target_hidden_size") or target.hidden_size
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"{_SOURCE}: target_hidden_size is {hidden!r}, the target has {target.hidden_size}; use the head that was "
            "trained for this target"
        )
    config = Eagle3Config(
        model,
        draft_vocab_size,
        target.hidden_size,
        _layers(data, tuple(layers), target.num_layers),
        norm_before_residual=bool(data.get("norm_before_residual", False)),
        fc_bias=weights.has_fc_bias,
    )
    _check(weights, config)
    return config


def _eagle_config(data: dict[str, Any]) -> dict[str, Any]:
    found = data.get("eagle_config")
    return found if isinstance(found, dict) else {}


def _layers(data: dict[str, Any], wanted: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layers whose entering hidden rows are the features. Engines read one key in two ways: at the top of config.json
    it names layers entered, under eagle_config some take it for layers left."""
    if wanted:
        return _checked(wanted, "--eagle3_layers", num_layers)
    nested = _eagle_config(data).get(LAYERS_KEY)
    listed = data.get(LAYERS_KEY)
    if listed is not None:
        return _checked(listed, f"{_SOURCE}: {LAYERS_KEY}", num_layers)
    if nested is not None:
        left = [layer + 1 if isinstance(layer, int) else layer for layer in nested] if isinstance(nested, list) else []
        raise CheckpointError(
            f"{_SOURCE}: eagle_config.{LAYERS_KEY} is {nested!r}, which engines read as layers entered or as layers "
            f"left; say which with --eagle3_layers {_text(nested)} or --eagle3_layers {_text(left)}"
        )
    usual = (2, num_layers // 2, num_layers - 3)
    if not usual[0] < usual[1] < usual[2]:
        raise CheckpointError(
            f"{_SOURCE}: {LAYERS_KEY} is missing, and a target of {num_layers} layers is too small for the usual ones; "
            "name the layers whose entering hidden rows the EAGLE-3 head reads with --eagle3_layers"
        )
    return usual


def _text(layers: Any) -> str:
    return ",".join(str(layer) for layer in layers) if isinstance(layers, (list, tuple)) else str(layers)


def _checked(layers: Any, what: str, num_layers: int) -> tuple[int, ...]:
    if (
        not isinstance(layers, (list, tuple))
        or not layers
        or not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in layers)
        or any(a >= b for a, b in itertools.pairwise(layers))
    ):
        raise CheckpointError(
            f"{what} is {_text(layers)}, it must name layers that rise from 0 to {num_layers}, the target's number"
        )
    return tuple(layers)


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head has, under our names."""
    hidden, layer = config.model.hidden_size, "model.layers.0"
    shapes = decoder_shapes(config.model)
    for part in "qkv":
        name = f"{layer}.self_attn.{part}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * hidden)
    shapes |= {"fc.weight": (hidden, config.num_features), f"{layer}.hidden_norm.weight": (hidden,)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    return shapes | {_HEAD: (config.draft_vocab_size, hidden)}


def _check(weights: Eagle3Weights, config: Eagle3Config) -> None:
    model = config.model
    if not weights.has_embedding and model.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head has no embed_tokens, and its hidden_size {model.hidden_size} is not the target's "
            f"({config.target_hidden_size}), so it cannot share the target's"
        )
    if config.draft_vocab_size < model.vocab_size and not (weights.has_target_ids and weights.has_head):
        raise CheckpointError(
            f"the EAGLE-3 head has a draft_vocab_size of {config.draft_vocab_size} but lacks d2t or lm_head; fetch the "
            "checkpoint again"
        )
    shapes = expected_shapes(config)
    found, wanted = weights.shape("fc.weight"), shapes["fc.weight"]
    if found != wanted:
        raise CheckpointError(
            f"fc.weight of the EAGLE-3 head has shape {list(found)}, hidden rows of {len(config.layers)} layers of "
            f"this target ask for {list(wanted)}"
        )
    check_shapes(weights, shapes)
    for name in weights.names:
        if name not in shapes and name != "d2t" and name != "t2d" and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"tensor {name} of the EAGLE-3 head is not one that config.json speaks of, so the head cannot be run"
            )
    weights.target_ids(config.draft_vocab_size, model.vocab_size)


def _our_name(name: str) -> str:
    """A decoder's names, and those that only a head has."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    is_decoders = name.startswith(("layers.", "norm.", "embed_tokens."))
    return f"model.{name}" if is_decoders else name
