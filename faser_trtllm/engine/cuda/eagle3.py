"""An EAGLE-3 head's layers in device memory, over the hidden rows that its target keeps there.

The head's row of the token at position t reads the target's hidden rows of position t - 1 or, in a draft step, its own
output of that position. Position 0 has no hidden row before it, so no other row sees it. The CPU engine does the same
(plugins/cpu/engine/draft_head.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.decoder import TorchDecoder
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.weights import DeviceWeights, HeadWeights, LayerWeights
from faser_trtllm.engine.gpu.batch import TokenRows
from faser_trtllm.engine.gpu.decoder import Bounds, Placement
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.verify_attention import BUT_FIRST

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Eagle3Decoder(TorchDecoder):
    """Decoder (engine/gpu/decoder.py) over a head's weights."""

    def __init__(
        self,
        weights: DeviceWeights,
        spec: EngineSpec,
        place: Placement,
        hidden_rows: HiddenRows | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_rows: the target's. kv_dtype: of the KV cache; None: the weights' dtype."""
        assert hidden_rows is not None, "a head reads its target's hidden rows"
        self._read = hidden_rows
        super().__init__(weights, spec, place, kv_dtype=kv_dtype)

    def _allocate(
        self, weights: DeviceWeights, spec: EngineSpec, runtime: Runtime, token_rows: TokenRows | None
    ) -> None:
        super()._allocate(weights, spec, runtime, self._read.rows_before)
        self._windows = [BUT_FIRST] * spec.num_layers
        sizes = weights.sizes["head"]
        self._takes_normed = bool(sizes["norm_before_residual"])
        self._feeds_normed, self._num_fc_norms = bool(sizes.get("feeds_normed")), sizes.get("num_fc_norms", 0)
        self._outputs = self._hidden.new_zeros((spec.max_batch_size, self._hidden.shape[1]))

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        kept = self._read.tensor.index_select(0, self.batch.token_rows[:rows])
        self._run_layers(self._features(kept), bounds)

    def write_logits(self, logits: Tensor) -> None:
        """See Decoder.write_logits. Keeps the rows for the next step."""
        outputs = self._outputs_of(self._hidden.index_select(0, self.batch.logit_rows[: logits.shape[0]]))
        num_kept = min(outputs.shape[0], self._outputs.shape[0])
        self._outputs[:num_kept].copy_(outputs[:num_kept])
        self._draft_logits(outputs, logits)

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        """See Decoder.step. Requests without a row keep their output and get the same logits again."""
        import torch

        outputs = self._outputs[:rows]
        self._run_layers(outputs, bounds)
        has_row = (self.batch.kv_lens[:rows] > 0)[:, None]
        outputs.copy_(torch.where(has_row, self._outputs_of(self._hidden[:rows]), outputs))
        self._draft_logits(outputs, logits)

    def close(self) -> None:
        super().close()
        del self._read, self._outputs

    @property
    def _head(self) -> HeadWeights:
        assert isinstance(self.weights.head, HeadWeights), "these are no EAGLE-3 head's weights"
        return self.weights.head

    def _features(self, kept: Tensor) -> Tensor:
        """Return the head's input features [rows, hidden] for the target's hidden rows [rows, num_features]."""
        import torch

        head = self._head
        if head.fc_norm is not None:
            parts = zip(kept.chunk(self._num_fc_norms, -1), head.fc_norm.chunk(self._num_fc_norms), strict=True)
            kept = torch.cat([self._ops.rms_norm(part, weight, self._eps) for part, weight in parts], -1)
        return self._product(kept, head.fc, head.fc_bias)

    def _outputs_of(self, hidden: Tensor) -> Tensor:
        """Return the last layer's hidden rows as the next step reads them: normed, if the head needs that."""
        return self._ops.rms_norm(hidden, self.weights.final_norm, self._eps) if self._feeds_normed else hidden

    def _run_layers(self, features: Tensor, bounds: Bounds) -> None:
        """Run all layers over features [rows, hidden]; self._hidden holds the result."""
        import torch

        ops, weights, rows = self._ops, self.weights, features.shape[0]
        layer, hidden = weights.layers[0], self._hidden[:rows]
        embedded = torch.index_select(weights.embedding, 0, self.batch.token_ids[:rows])
        normed = ops.rms_norm(features, self._head.hidden_norm, self._eps)
        x = torch.cat((ops.rms_norm(embedded, self._head.input_norm, self._eps), normed), -1)
        hidden.copy_(normed if self._takes_normed else features)
        qkv = self._product(x, layer.qkv, layer.qkv_bias)
        self._norm_heads(qkv, layer)
        self._finish_layer(0, qkv, None, hidden, bounds)
        for index in range(1, len(weights.layers)):
            self._layer(index, hidden, None, bounds)

    def _norm_heads(self, qkv: Tensor, layer: LayerWeights) -> None:
        """Norm the heads in place: append_kv only norms heads of products that it scales by their rows."""
        heads, num_q, num_k = qkv.view(qkv.shape[0], -1, self._head_dim), self._num_heads, self._num_kv_heads
        for part, norm in ((heads[:, :num_q], layer.q_norm), (heads[:, num_q : num_q + num_k], layer.k_norm)):
            if norm is not None:
                part.copy_(self._ops.rms_norm(part, norm, self._eps))

    def _product(self, x: Tensor, weight: Tensor | ScaledRows, bias: Tensor | None) -> Tensor:
        """Return x times weight plus bias in x's dtype, since no later kernel normalizes it."""
        found = self._ops.linear(x, weight).to(x.dtype)
        return found if bias is None else found.add_(bias)

    def _draft_logits(self, outputs: Tensor, logits: Tensor) -> None:
        norm = self.weights.final_norm
        x = outputs if self._feeds_normed else self._ops.rms_norm(outputs, norm, self._eps)
        self._spread_head(x, self._head.target_ids, logits)
