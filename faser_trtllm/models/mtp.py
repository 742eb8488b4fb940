"""An MTP layer (multi-token prediction), which lies in its target's own checkpoint: MiMo's `model.mtp_layers.0.*`.

It drafts like an EAGLE-3 head, from one hidden row of the target, and is applied again to its own output for each
further draft. Which row it reads is no key of config.json, and public engines differ: vLLM, whose code is the model's
authors', takes the last layer's before the final norm, SGLang and FastMTP's training take it behind that.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig, read_json
from faser_trtllm.models.weights import Bfloat16Array, Float32Array, Weights, expected_shapes

_SOURCE, _KEY, _PREFIX = "config.json", "num_nextn_predict_layers", "model.mtp_layers.0."
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")
_OWN = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight")


@dataclasses.dataclass(frozen=True, slots=True)
class MtpConfig:
    """model: of the layer, one of its target's. layer: the target's num_layers, whose last hidden row is read.
    reads_normed: behind the target's final norm."""

    model: ModelConfig
    layer: int
    reads_normed: bool


class MtpWeights:
    """The layer's tensors (Weights) as a decoder's of one layer, `model.layers.0.*` and so on, with what it shares with
    its target, and its own: token_layernorm, hidden_layernorm and input_proj, whose inputs are the normed hidden row
    and then the normed embedding; target.norm.weight is the target's final norm."""

    def __init__(self, target: Weights, tied: bool) -> None:
        """tied: the target's LM head is its embedding."""
        self._target = target
        self._tied = tied

    def shape(self, name: str) -> tuple[int, ...]:
        return self._target.shape(self._name(name))

    def bfloat16(self, name: str, shape: tuple[int, ...]) -> Bfloat16Array:
        return self._target.bfloat16(self._name(name), shape)

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        return self._target.float32(self._name(name), shape)

    def embedding_first(self, hidden: int) -> Bfloat16Array:
        """input_proj [hidden, 2 * hidden] for the normed embedding and then the normed hidden row."""
        weight = self.bfloat16("input_proj.weight", (hidden, 2 * hidden))
        return np.concatenate((weight[:, hidden:], weight[:, :hidden]), 1)

    def _name(self, name: str) -> str:
        if name in _SHARED:
            return _SHARED[0] if self._tied else name
        if name == "target.norm.weight":
            return "model.norm.weight"
        return _PREFIX + name.replace("model.norm.", "final_layernorm.").removeprefix("model.layers.0.")


def load_mtp_config(
    checkpoint: Path, weights: MtpWeights, target: ModelConfig, num_layers: int, *, reads_normed: bool
) -> MtpConfig:
    """target: of the checkpoint; num_layers: of it as it may have been expanded. CheckpointError in one sentence for a
    checkpoint without such a layer, and for what is not supported."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"mtp is set, but {checkpoint} is a GGUF file; MTP layers are read from Hugging Face folders"
        )
    found = read_json(checkpoint / _SOURCE).get(_KEY)
    if not found:
        raise CheckpointError(f"{_SOURCE}: {_KEY} is {found!r}, so {checkpoint} has no MTP layer; leave mtp out")
    if found != 1:
        raise CheckpointError(f"{_SOURCE}: {_KEY} is {found!r}, only one MTP layer, applied again, is supported")
    if target.sliding_window:
        raise CheckpointError(
            f"{_SOURCE}: sliding_window is {target.sliding_window}, an MTP layer with a window is not supported"
        )
    model = dataclasses.replace(target, num_layers=1, tie_word_embeddings=False)
    hidden = model.hidden_size
    own = dict.fromkeys(_OWN, (hidden,)) | {"input_proj.weight": (hidden, 2 * hidden)}
    for name, shape in (expected_shapes(model) | own).items():
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} of the MTP layer has shape {list(weights.shape(name))}, {_SOURCE} asks for "
                f"{list(shape)}"
            )
    return MtpConfig(model, num_layers, reads_normed)
