"""An MTP layer (multi-token prediction) in its target's own checkpoint: MiMo's `model.mtp_layers.0.*`.

The layer drafts like an EAGLE-3 head, from one hidden row of the target; for each further draft it reads its own
output. config.json does not say which row it reads, and engines differ: vLLM, whose code is by the model's authors,
feeds it the last layer's output before the final norm; SGLang and FastMTP's training, after the norm.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig, read_json
from faser_trtllm.models.weights import DerivedWeights, Weights, check_shapes, expected_shapes

_SOURCE, _KEY, _PREFIX = "config.json", "num_nextn_predict_layers", "model.mtp_layers.0."
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")
_OWN = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight")


@dataclasses.dataclass(frozen=True, slots=True)
class MtpConfig:
    """An MTP layer. layer: the target's num_layers, for its last output. reads_normed: that after the final norm."""

    model: ModelConfig
    layer: int
    reads_normed: bool


class MtpWeights(DerivedWeights):
    """The layer's tensors under a decoder's names, with those that it shares with the target.

    A decoder has no token_layernorm, hidden_layernorm and input_proj, whose inputs are the normed hidden row and then
    the normed embedding. target.norm.weight is the target's final norm.
    """

    def __init__(self, target: Weights, tied: bool) -> None:
        """Map the names; tied: the target's LM head is its embedding."""
        self._target = target
        self._tied = tied

    def source(self, name: str) -> tuple[Weights, str]:
        if name in _SHARED:
            name = _SHARED[0] if self._tied else name
        elif name == "target.norm.weight":
            name = "model.norm.weight"
        else:
            name = _PREFIX + name.replace("model.norm.", "final_layernorm.").removeprefix("model.layers.0.")
        return self._target, name


def load_mtp_config(
    checkpoint: Path, weights: MtpWeights, target: ModelConfig, num_layers: int, *, reads_normed: bool
) -> MtpConfig:
    """Read the layer's configuration. num_layers: the target's number after --expand.

    CheckpointError if the checkpoint has no MTP layer, or one that is not supported.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"mtp is set, but {checkpoint} is a GGUF file; MTP layers are read from Hugging Face folders"
        )
    found = read_json(checkpoint / _SOURCE).get(_KEY)
    if not found:
        raise CheckpointError(f"{_SOURCE}: {_KEY} is {found!r}, so {checkpoint} has no MTP layer; leave mtp out")
    if found != 1:
        raise CheckpointError(f"{_SOURCE}: {_KEY} is {found!r}, only one MTP layer, applied again, is supported")
    if any(target.windows):
        raise CheckpointError(
            f"{_SOURCE}: sliding_window is {max(target.windows)}, an MTP layer with a window is not supported"
        )
    model = dataclasses.replace(target, num_layers=1, windows=(0,), tie_word_embeddings=False)
    hidden = model.hidden_size
    own = dict.fromkeys(_OWN, (hidden,)) | {"input_proj.weight": (hidden, 2 * hidden)}
    check_shapes(weights, expected_shapes(model) | own)
    return MtpConfig(model, num_layers, reads_normed)
