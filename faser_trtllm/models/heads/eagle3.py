"""An EAGLE-3 head's checkpoint (arXiv 2503.01840) in the published layouts.

Tensors are named `midlayer.*` (SafeAILab) or `layers.0.*` (SpecForge, vLLM, TensorRT-LLM), with or without `model.`
before the name. config.json is flat, or has the layers under `transformer_layer_config` (speculators). A head without
its own embedding uses the target's.

Layouts count positions from 1 (speculators) or 0 (others), which makes no difference because RoPE is relative.
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
from faser_trtllm.models.config import (
    Fields,
    ModelConfig,
    architectures_of,
    parse_model_config,
    read_json,
    sliding_layers,
)
from faser_trtllm.models.heads.tensors import HEAD, HeadTensors
from faser_trtllm.models.heads.torch_file import HeadFiles
from faser_trtllm.models.weights import Weights
from faser_trtllm.models.weights import expected_shapes as decoder_shapes

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS_LEFT_KEY = "target_layer_ids"
NORM_OUTPUTS = ("fed", "head")
_SOURCE = "config.json"
_DEEPSPEC = "Qwen3Eagle3Model"
_Q_NORM = "model.layers.0.self_attn.q_norm.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head.

    model: the head's layers, the first of which also reads the embedding; vocab_size is the target's.
    layers: the target's layers whose inputs are the features, ascending; num_layers means the last layer's output.
    num_fc_norms: norms before fc; 1: one over all features, more: one per layer.
    feeds_normed: the next draft reads the head's output after its final norm, not before it.
    """

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...]
    norm_before_residual: bool
    fc_bias: bool
    num_fc_norms: int = 0
    feeds_normed: bool = False

    @property
    def num_features(self) -> int:
        return len(self.layers) * self.target_hidden_size


def is_eagle3(checkpoint_dir: Path) -> bool:
    """Return True if config.json has EAGLE-3's architecture or a draft vocabulary; CheckpointError if unreadable."""
    data = read_json(checkpoint_dir / _SOURCE)
    named = any("eagle3" in name.lower() for name in architectures_of(data))
    return named or "draft_vocab_size" in data or data.get("speculators_model_type") == "eagle3"


class Eagle3Weights(HeadTensors):
    """Tensors of a head."""

    def __init__(self, checkpoint: HeadFiles, target: Weights) -> None:
        super().__init__("EAGLE-3 head", checkpoint, _our_name, target)
        self.has_target_ids = "d2t" in self.names
        self.has_fc_bias = "fc.bias" in self.names
        self.has_qk_norm = _Q_NORM in self.names

    def target_ids(self, draft_vocab_size: int, vocab_size: int) -> npt.NDArray[np.int32] | None:
        """Return the token id of each output, int32 [draft_vocab_size]: i + d2t[i]; None if output i is token i.

        CheckpointError for ids that the target does not have, or that occur twice.
        """
        if not self.has_target_ids:
            return None
        offsets = self._checkpoint.integers(self.names["d2t"], (draft_vocab_size,))
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


def load_eagle3_config(
    checkpoint_dir: Path,
    weights: Eagle3Weights,
    target: ModelConfig,
    layers: Sequence[int] = (),
    norm_output: str = "",
) -> Eagle3Config:
    """Read a head's config.json. layers and norm_output (one of NORM_OUTPUTS), if given, override what it says.

    Raises CheckpointError for a key that is missing, not supported, or does not fit the target.
    """
    data = read_json(checkpoint_dir / _SOURCE)
    nested = data.get("transformer_layer_config")
    own = data | nested if isinstance(nested, dict) else data
    own = {"num_hidden_layers": 1, "max_position_embeddings": target.max_position_embeddings} | own
    own |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    model = parse_model_config(own | {"layer_types": None}, _SOURCE)
    if model.num_layers != 1 and _DEEPSPEC in architectures_of(data):
        raise CheckpointError(
            f"{_SOURCE}: num_hidden_layers is {model.num_layers}, and each layer of a {_DEEPSPEC} reads the embedding; "
            "only such heads of one layer are supported"
        )
    model = dataclasses.replace(model, qk_norm=weights.has_qk_norm, windows=_windows(own, model.num_layers))
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
            f"{_SOURCE}: draft_vocab_size is {draft_vocab_size!r}; it must be from 1 to vocab_size ({model.vocab_size})"
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
        norm_before_residual=_flag(data, "norm_before_residual"),
        fc_bias=weights.has_fc_bias,
        feeds_normed=_feeds_normed(data, norm_output),
    )
    config = dataclasses.replace(config, num_fc_norms=_num_fc_norms(data, len(config.layers)))
    _check(weights, config)
    return config


def _eagle_config(data: dict[str, Any]) -> dict[str, Any]:
    found = data.get("eagle_config")
    return found if isinstance(found, dict) else {}


def _flag(data: dict[str, Any], name: str) -> bool:
    """Return a flag at the top of config.json or under eagle_config; False if it is missing."""
    found = [level[name] for level in (data, _eagle_config(data)) if level.get(name) is not None]
    if any(value is not found[0] for value in found) or not all(isinstance(value, bool) for value in found):
        given = " and ".join(repr(value) for value in found)
        raise CheckpointError(
            f"{_SOURCE}: {name} is {given:.80}; it must be true or false, and the same wherever it is set"
        )
    return bool(found and found[0])


def _num_fc_norms(data: dict[str, Any], num_layers: int) -> int:
    of_each, of_all = _flag(data, "fc_norm"), _flag(data, "norm_before_fc")
    if of_each and of_all:
        raise CheckpointError(
            f"{_SOURCE}: fc_norm and norm_before_fc are both set, and a head norms either each hidden row that fc "
            "reads or all of them as one; remove the one that it was not trained with"
        )
    return num_layers if of_each else int(of_all)


def _feeds_normed(data: dict[str, Any], wanted: str) -> bool:
    """Return True if the next draft reads the final norm's output. The key norm_output has two meanings.

    vLLM, SGLang, speculators and TensorRT-LLM, and SpecForge since September 2026, feed the norm's output to the next
    draft. In SpecForge's earlier heads, and in EAGLE-3 without the key, only the LM head reads it.
    """
    if not _flag(data, "norm_output"):
        if wanted:
            raise CheckpointError(
                f"{_SOURCE}: norm_output is not set, and --eagle3_norm_output ({wanted}) has a meaning only for heads "
                "that set it; leave the option out"
            )
        return False
    if not wanted and data.get("speculators_model_type") != "eagle3":
        raise CheckpointError(
            f"{_SOURCE}: norm_output is true, which has a different meaning in SpecForge's heads until September 2026; "
            "say what reads the final norm's output: --eagle3_norm_output fed (the next draft, too) or "
            "--eagle3_norm_output head (the LM head only)"
        )
    return wanted != "head"


def _windows(data: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer in tokens, including the row itself, from layer_types; 0 for all tokens."""
    slides = sliding_layers(Fields(data, _SOURCE), num_layers) or (False,) * num_layers
    window: Any = data.get("sliding_window")
    if any(slides) and (isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 2**31):
        raise CheckpointError(
            f"{_SOURCE}: sliding_window is {window!r:.80}, layer_types of sliding_attention ask for a number of tokens"
        )
    return tuple(window if slide else 0 for slide in slides)


def _layers(data: dict[str, Any], wanted: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs are the features. wanted: the user's choice, () for config.json's.

    At the top of config.json LAYERS_KEY names layers by their inputs; under eagle_config some engines read it as layers
    by their outputs. LAYERS_LEFT_KEY names them by their outputs in DeepSpec's heads, with -1 for the embedding; its
    meaning in other heads is unknown.
    """
    if wanted:
        return _checked(wanted, "--eagle3_layers", num_layers)
    nested = _eagle_config(data).get(LAYERS_KEY)
    listed = data.get(LAYERS_KEY)
    if listed is not None:
        return _checked(listed, f"{_SOURCE}: {LAYERS_KEY}", num_layers)
    left = data.get(LAYERS_LEFT_KEY)
    if left is not None and _DEEPSPEC in architectures_of(data):
        return _checked(_after(left), f"{_SOURCE}: {LAYERS_LEFT_KEY} + 1", num_layers)
    for name, found in ((f"eagle_config.{LAYERS_KEY}", nested), (LAYERS_LEFT_KEY, left)):
        if found is not None:
            raise CheckpointError(
                f"{_SOURCE}: {name} is {found!r:.80}, which engines read as layers by input or by output; say "
                f"which with --eagle3_layers {_text(found):.80} or --eagle3_layers {_text(_after(found)):.80}"
            )
    usual = (2, num_layers // 2, num_layers - 3)
    if not usual[0] < usual[1] < usual[2]:
        raise CheckpointError(
            f"{_SOURCE}: {LAYERS_KEY} is missing, and a target of {num_layers} layers is too small for the usual ones; "
            "name the layers whose inputs the EAGLE-3 head reads with --eagle3_layers"
        )
    return usual


def _after(layers: Any) -> Any:
    """Add 1 to each layer number, to turn outputs into inputs; return a value that is not a list unchanged."""
    return [layer + 1 if isinstance(layer, int) else layer for layer in layers] if isinstance(layers, list) else layers


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
            f"{what} is {_text(layers)}; it must name layers that rise from 0 to {num_layers}, the target's number"
        )
    return tuple(layers)


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return {our name: shape} of every tensor of a head."""
    hidden, layer, num_norms = config.model.hidden_size, "model.layers.0", config.num_fc_norms
    shapes = decoder_shapes(config.model)
    for part in "qkv":
        name = f"{layer}.self_attn.{part}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * hidden)
    shapes |= {"fc.weight": (hidden, config.num_features), f"{layer}.hidden_norm.weight": (hidden,)}
    shapes |= {f"fc_norm.{i}.weight": (config.num_features // num_norms,) for i in range(num_norms)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    return shapes | {HEAD: (config.draft_vocab_size, hidden)}


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
    weights.check(expected_shapes(config), len(config.layers), "d2t|t2d")
    weights.target_ids(config.draft_vocab_size, model.vocab_size)


def _our_name(name: str) -> str:
    """Return our name of a tensor: a decoder's name if a decoder has the tensor."""
    name = name.removeprefix("model.")
    if name == "input_norm.weight":
        name = "fc_norm.0.weight"
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    is_decoders = name.startswith(("layers.", "norm.", "embed_tokens."))
    return f"model.{name}" if is_decoders else name
