"""Tensors of a draft head of whole decoder layers (EAGLE-3, block drafters), some of which may be its target's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.heads.torch_file import HeadFiles
from faser_trtllm.models.weights import DerivedWeights, Weights, check_shapes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class HeadTensors(DerivedWeights):
    """Tensors of a head under our names: a decoder's name, such as model.layers.0.*, for each that a decoder has.

    The embedding and the LM head come from `target` if the head has none. names: the checkpoint's names by ours.
    """

    def __init__(
        self, what: str, checkpoint: HeadFiles, our_name: Callable[[str], str], target: Weights, tied: bool = False
    ) -> None:
        """Map the names; CheckpointError for a tensor that occurs twice. tied: the target ties its LM head."""
        self._what, self._checkpoint, self._target, self._tied = what, checkpoint, target, tied
        self.names: dict[str, str] = {}
        for name in checkpoint:
            ours = our_name(name)
            if ours in self.names:
                raise CheckpointError(
                    f"tensors {self.names[ours]} and {name} of the {what} are the same one here; fetch the checkpoint "
                    "again"
                )
            self.names[ours] = name
        self.has_embedding, self.has_head = EMBEDDING in self.names, HEAD in self.names

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def source(self, name: str) -> tuple[Weights, str]:
        if name in self.names:
            return self._checkpoint, self.names[name]
        if name in (EMBEDDING, HEAD):
            return self._target, EMBEDDING if self._tied else name
        return self._checkpoint, name.removeprefix("model.")  # raises CheckpointError

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_layers: int, unused: str) -> None:
        """Raise CheckpointError unless the tensors have these shapes. num_layers: of the target, read by fc. unused: a
        regex of our names of further tensors that are allowed."""
        found, wanted = self.shape("fc.weight"), shapes["fc.weight"]
        if found != wanted:
            raise CheckpointError(
                f"fc.weight of the {self._what} has shape {list(found)}, hidden rows of {num_layers} layers of this "
                f"target ask for {list(wanted)}"
            )
        check_shapes(self, shapes)
        for ours, name in self.names.items():
            if ours not in shapes and not re.fullmatch(rf"{unused}|.*rotary_emb\.inv_freq", ours):
                raise CheckpointError(
                    f"tensor {name:.80} of the {self._what} is not part of the model that its config.json describes; "
                    "use a checkpoint whose config.json describes all its tensors"
                )
