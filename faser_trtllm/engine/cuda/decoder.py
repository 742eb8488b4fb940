"""A model's layers over rows in device memory: torch computes the GEMMs, our kernels the rest.

RMSNorm has no kernel of its own: its weights are folded into the next matrix (engine/cuda/weights.py), and append_kv
and gated_silu divide the product by the row's root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.weights import DeviceWeights, LayerWeights
from faser_trtllm.engine.gpu.batch import DeviceBatch, TokenRows
from faser_trtllm.engine.gpu.decoder import Bounds, Placement
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.models.config import layer_windows
from faser_trtllm.ops.cuda.append_kv import QkvNorm, Rope
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.tensors import PagedKv
from faser_trtllm.ops.cuda.verify_attention import MAX_WHOLE_TOKENS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# append_kv and gated_silu divide by the root mean square of a row. For rows that are normed already, they get a row of
# this many ones.
UNSCALED = 8
_NARROW_ROWS = 16  # rows of attention's narrow tile: query rows times query heads per KV head


class TorchDecoder:
    """Decoder (engine/gpu/decoder.py) over a model's weights."""

    has_fixed_shapes = False
    has_prune_plan = False
    has_kv = True
    num_distinct: Tensor | None = None
    _scales_inner = True  # the input of an MLP's last product may be in e4m3

    def __init__(
        self,
        weights: DeviceWeights,
        spec: EngineSpec,
        place: Placement,
        hidden_rows: HiddenRows | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_rows: where every pass keeps rows for a head. kv_dtype: of the KV cache; None: the weights' dtype."""
        self._ops, self._kv_dtype = place.ops, kv_dtype
        place.runtime.wait()  # other streams do not wait for the default stream, which may still copy weights
        with place.runtime.on(place.partition):
            self._allocate(weights, spec, place.runtime, None if hidden_rows is None else hidden_rows.own_rows)
        self._hidden_rows = hidden_rows

    @property
    def is_read(self) -> bool:
        return self._hidden_rows is not None

    def _allocate(
        self, weights: DeviceWeights, spec: EngineSpec, runtime: Runtime, token_rows: TokenRows | None
    ) -> None:
        import torch

        self.batch = DeviceBatch(runtime, spec, token_rows=token_rows)
        self._segments, self._max_seq_len = spec.segments, spec.max_seq_len

        sizes = weights.sizes
        self.weights = weights
        self._num_heads, self._num_kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        self._head_dim, self._eps = sizes["head_dim"], sizes["rms_norm_eps"]
        self._norms_all_heads = sizes.get("norms_all_heads", False)
        self._windows = layer_windows(sizes)
        device, dtype = weights.embedding.device, weights.embedding.dtype
        heads = (spec.max_num_tokens, self._num_heads, self._head_dim)
        self._hidden = torch.zeros((spec.max_num_tokens, sizes["hidden_size"]), dtype=dtype, device=device)
        self._ones = torch.ones((spec.max_num_tokens * max(1, spec.top_k), UNSCALED), dtype=dtype, device=device)
        self._q = torch.zeros(heads, dtype=dtype, device=device)
        self._attended = torch.zeros(heads, dtype=dtype, device=device)
        cache = (spec.num_layers, 2, spec.num_kv_blocks, self._num_kv_heads, spec.tokens_per_block, self._head_dim)
        # Zeroed: kernels multiply masked positions by zero, and NaN would survive that.
        self.cache = torch.zeros(cache, dtype=self._kv_dtype or dtype, device=device)
        batch = self.batch
        requests = (batch.block_table, batch.cu_q_lens, batch.kv_lens)
        self._kv = [PagedKv(k_cache, v_cache, *requests) for k_cache, v_cache in self.cache]
        self._cos, self._sin = weights.cos[: spec.max_seq_len], weights.sin[: spec.max_seq_len]

    def query_rows(self, num_query_rows: int, rows: int) -> int:
        """See Decoder.query_rows. One bucket is the rows that fit attention's narrow tile, the other is all rows."""
        if self._ops.is_deterministic:
            return rows
        narrow = max(1, _NARROW_ROWS // (self._num_heads // self._num_kv_heads))
        return narrow if num_query_rows <= narrow else rows

    @property
    def weight_bytes(self) -> int:
        return self.weights.num_bytes

    def kv_lens(self) -> tuple[int, ...]:
        """See Decoder.kv_lens. Attention over a single chunk needs no workspace and no search for further chunks."""
        return (MAX_WHOLE_TOKENS, self._max_seq_len) if self._max_seq_len > MAX_WHOLE_TOKENS else (self._max_seq_len,)

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        import torch

        hidden = self._hidden[:rows]
        if first == 0:
            torch.index_select(self.weights.embedding, 0, self.batch.token_ids[:rows], out=hidden)
        scaled: ScaledRows | None = None
        for index in range(self._segments[first], self._segments[last]):
            self._keep(index, hidden)
            scaled = self._layer(index, hidden, scaled, bounds)
        if last == len(self._segments) - 1:
            self._keep(self._segments[last], hidden)

    def write_logits(self, logits: Tensor) -> None:
        kept = self._hidden.index_select(0, self.batch.logit_rows[: logits.shape[0]])
        self._multiply_head(self._ops.rms_norm(kept, self.weights.final_norm, self._eps), logits)

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        self.run(rows, 0, len(self._segments) - 1, bounds)
        self.write_logits(logits)

    def hidden(self, segment: int) -> Tensor:
        return self._hidden

    def early_exit(self, segment: int, num_hidden: int, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        weights = self.weights
        self._ops.early_exit(self._hidden, rows, weights.final_norm, weights.lm_head, candidates, self._eps, out)

    def prune(self, segment: int, rows: int, inputs: Mapping[str, Tensor], kept: Tensor) -> None:
        raise NotImplementedError("the cuda backend prunes kernel by kernel")

    def copy_kv(self, copies: Tensor) -> None:
        self._ops.copy_kv(copies, self.cache.view(-1, *self.cache.shape[2:]))
        if self._hidden_rows is not None:
            self._hidden_rows.copy(self._ops, copies)

    def close(self) -> None:
        del self.batch, self.weights, self._hidden, self.cache, self._kv, self._q, self._attended, self._hidden_rows
        del self._ones

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if self._hidden_rows is not None:
            self._hidden_rows.keep(layer, self.batch.token_rows[: hidden.shape[0]], hidden)

    def _layer(self, index: int, hidden: Tensor, scaled: ScaledRows | None, bounds: Bounds) -> ScaledRows | None:
        """Run a layer. scaled: its input `hidden` in e4m3, if known. Return the new `hidden` in e4m3, if known."""
        layer = self.weights.layers[index]
        if self._norms_all_heads:
            unscaled = QkvNorm(self._ones[: hidden.shape[0]], 0.0)
            return self._finish_layer(index, self._normed_qkv(layer, hidden), unscaled, hidden, bounds)
        qkv = self._ops.linear(hidden, layer.qkv, scaled)
        norm = QkvNorm(hidden, self._eps, layer.qkv_bias, layer.q_norm, layer.k_norm)
        return self._finish_layer(index, qkv, norm, hidden, bounds)

    def _normed_qkv(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """Return the first product with q_norm and k_norm of all heads applied, which append_kv cannot do."""
        ops, q_size = self._ops, self._num_heads * self._head_dim
        k_end = q_size + self._num_kv_heads * self._head_dim
        qkv = ops.linear(ops.rms_norm(hidden, None, self._eps), layer.qkv).to(hidden.dtype)
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        for part, norm in ((qkv[:, :q_size], layer.q_norm), (qkv[:, q_size:k_end], layer.k_norm)):
            part.copy_(ops.rms_norm(part, norm, self._eps))
        return qkv

    def _finish_layer(
        self, index: int, qkv: Tensor, norm: QkvNorm | None, hidden: Tensor, bounds: Bounds
    ) -> ScaledRows | None:
        """Run the rest of a layer after its first product; hidden is the residual."""
        ops, batch, rows = self._ops, self.batch, hidden.shape[0]
        layer, kv, window = self.weights.layers[index], self._kv[index], self._windows[index]
        q, attended = self._q[:rows], self._attended[:rows]
        rope = Rope(self._cos, self._sin, batch.positions[:rows])
        ops.append_kv(qkv, rope, kv, q, norm, batch.first_branch)
        max_query_rows, max_kv_len = bounds.max_query_rows, bounds.max_kv_len
        ops.verify_attention(
            q,
            kv,
            attended,
            window=window,
            max_query_rows=max_query_rows,
            max_kv_len=max_kv_len,
            sinks=layer.sinks,
        )
        scaled = self._add_product(hidden, attended.view(rows, -1), layer.o, layer.o_bias)
        return self._add_mlp(layer, hidden, scaled)

    def _add_mlp(self, layer: LayerWeights, hidden: Tensor, scaled: ScaledRows | None) -> ScaledRows | None:
        ops = self._ops
        assert not isinstance(layer.gate_up, Mxfp4Matrices), "only experts are in MXFP4"
        assert not isinstance(layer.down, Mxfp4Matrices), "only experts are in MXFP4"
        gate_up = ops.linear(hidden, layer.gate_up, scaled)
        silu = ops.scaled_silu if self._scales_inner and isinstance(layer.down, ScaledRows) else ops.gated_silu
        inner = silu(gate_up, hidden, layer.gate_up_bias, self._eps)
        return self._add_product(hidden, inner, layer.down, layer.down_bias)

    def _add_product(
        self, hidden: Tensor, x: Tensor | ScaledRows, weight: Tensor | ScaledRows, bias: Tensor | None
    ) -> ScaledRows | None:
        return self._ops.add_linear(hidden, x, weight, bias)

    def _multiply_head(self, x: Tensor, logits: Tensor) -> None:
        self._spread_head(x, self.weights.output_ids, logits)

    def _spread_head(self, x: Tensor, ids: Tensor | None, logits: Tensor) -> None:
        """Multiply by the LM head, whose outputs are the tokens `ids` (None: all); logits of other tokens are -inf."""
        import torch

        if ids is None:
            self._ops.logits(x, self.weights.lm_head, logits)
            return
        drafted = torch.empty((x.shape[0], ids.shape[0]), dtype=torch.float32, device=x.device)
        self._ops.logits(x, self.weights.lm_head, drafted)
        logits.fill_(-math.inf)
        logits.index_copy_(1, ids, drafted)
