"""A target's own MTP layer in device memory: an EAGLE-3 head wired differently (plugins/cpu/engine/draft_head.cpp).

The normed hidden row and the normed embedding go through one projection and then a decoder layer with a final norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.engine.cuda.eagle3 import Eagle3Decoder
from faser_trtllm.engine.cuda.weights import MtpWeights
from faser_trtllm.engine.gpu.decoder import Bounds

if TYPE_CHECKING:
    from torch import Tensor


class MtpDecoder(Eagle3Decoder):
    """Decoder (engine/gpu/decoder.py) over an MTP layer's weights."""

    @property
    def _mtp(self) -> MtpWeights:
        assert isinstance(self.weights.head, MtpWeights), "these are no MTP layer's weights"
        return self.weights.head

    def _features(self, kept: Tensor) -> Tensor:
        norm = self._mtp.target_norm
        return kept if norm is None else self._ops.rms_norm(kept, norm, self._eps)

    def _outputs_of(self, hidden: Tensor) -> Tensor:
        return self._ops.rms_norm(hidden, self.weights.final_norm, self._eps)

    def _draft_logits(self, outputs: Tensor, logits: Tensor) -> None:
        self._ops.logits(outputs, self.weights.lm_head, logits)

    def _run_layers(self, features: Tensor, bounds: Bounds) -> None:
        import torch

        ops, weights, mtp, rows = self._ops, self.weights, self._mtp, features.shape[0]
        hidden = self._hidden[:rows]
        embedded = torch.index_select(weights.embedding, 0, self.batch.token_ids[:rows])
        normed = ops.rms_norm(features, mtp.hidden_norm, self._eps)
        x = torch.cat((normed, ops.rms_norm(embedded, mtp.token_norm, self._eps)), -1)
        hidden.copy_(self._product(x, mtp.input_proj, None))
        self._layer(0, hidden, None, bounds)
