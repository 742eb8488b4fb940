"""The decoder's layers over rows in device memory: GEMMs and norms by torch, attention and KV cache by our kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda_batch import DeviceBatch
from faser_trtllm.engine.cuda_ops import Ops
from faser_trtllm.engine.cuda_weights import DeviceWeights, LayerWeights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bounds:
    """The host's bounds over the requests of a pass, which choose tiles and splits of attention."""

    max_query_rows: int
    max_kv_len: int


class Decoder:
    """Weights, KV memory, and the rows' hidden states [max_num_tokens, hidden_size], each at one place for life."""

    def __init__(self, weights: DeviceWeights, ops: Ops, spec: EngineSpec) -> None:
        import torch

        sizes = weights.sizes
        self.weights = weights
        self._ops = ops
        self._num_heads, self._num_kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        self._head_dim, self._eps = sizes["head_dim"], sizes["rms_norm_eps"]
        device, dtype = weights.embedding.device, weights.embedding.dtype
        heads = (spec.max_num_tokens, self._num_heads, self._head_dim)
        self.hidden = torch.zeros((spec.max_num_tokens, sizes["hidden_size"]), dtype=dtype, device=device)
        self._q = torch.zeros(heads, dtype=dtype, device=device)
        self._attended = torch.zeros(heads, dtype=dtype, device=device)
        cache = (spec.num_layers, 2, spec.num_blocks, self._num_kv_heads, spec.tokens_per_block, self._head_dim)
        # Zeros, since a kernel multiplies what a row does not see by zero, and NaN would stay.
        self.cache = torch.zeros(cache, dtype=dtype, device=device)
        self._cos, self._sin = weights.cos[: spec.max_seq_len], weights.sin[: spec.max_seq_len]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self._num_heads // self._num_kv_heads)

    def run(self, batch: DeviceBatch, rows: int, first: int, last: int, bounds: Bounds) -> None:
        """Layers first to last of the batch's first `rows` rows, dummies included; 0 begins with the embedding."""
        import torch

        hidden = self.hidden[:rows]
        if first == 0:
            torch.index_select(self.weights.embedding, 0, batch.token_ids[:rows], out=hidden)
        for index in range(first, last):
            self._layer(self.weights.layers[index], self.cache[index], batch, hidden, bounds)

    def logits(self, rows: Tensor, out: Tensor) -> None:
        """Final norm and LM head of hidden rows [n] int32 -> out fp32 [n, vocab_size]."""
        x = self._ops.rms_norm(self.hidden.index_select(0, rows), self.weights.final_norm, self._eps)
        self._ops.logits(x, self.weights.lm_head, out)

    def early_exit(self, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        """What the LM head says of hidden rows [n] int32 -> out fp32 [n, num_candidates]."""
        weights = self.weights
        self._ops.early_exit(self.hidden, rows, weights.final_norm, weights.lm_head, candidates, self._eps, out)

    def _layer(self, layer: LayerWeights, cache: Tensor, batch: DeviceBatch, hidden: Tensor, bounds: Bounds) -> None:
        ops, rows = self._ops, hidden.shape[0]
        q, attended = self._q[:rows], self._attended[:rows]
        qkv = ops.linear(ops.rms_norm(hidden, layer.input_norm, self._eps), layer.qkv, layer.qkv_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            heads = qkv.view(rows, -1, self._head_dim)
            for norm, start, count in (
                (layer.q_norm, 0, self._num_heads),
                (layer.k_norm, self._num_heads, self._num_kv_heads),
            ):
                part = heads[:, start : start + count]
                part.copy_(ops.rms_norm(part, norm, self._eps))
        table = (batch.block_table, batch.kv_lens)
        ops.append_kv(qkv, self._cos, self._sin, batch.positions[:rows], batch.cu_q_lens, *table, q, cache[0], cache[1])
        ops.verify_attention(
            q,
            cache[0],
            cache[1],
            batch.block_table,
            batch.cu_q_lens,
            batch.kv_lens,
            attended,
            window=self.weights.sizes["sliding_window"],
            max_query_rows=bounds.max_query_rows,
            max_kv_len=bounds.max_kv_len,
        )
        hidden += ops.linear(attended.view(rows, -1), layer.o, layer.o_bias)
        gate_up = ops.linear(ops.rms_norm(hidden, layer.post_norm, self._eps), layer.gate_up, layer.gate_up_bias)
        hidden += ops.linear(ops.gated_silu(gate_up), layer.down, layer.down_bias)
