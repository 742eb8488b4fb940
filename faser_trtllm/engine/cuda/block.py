"""A block drafter (DFlash, DFlash2, DSpark) in device memory, over the hidden rows that its target keeps there.

The rows of a pass are context: the drafter only computes keys and values of every layer from the target's hidden rows
at their positions. The logits of a request's last row need a pass of their own, over a block of rows that see the
context and each other. It computes the logits of all draft places at once, and a step only moves to the next place, as
on the CPU (plugins/cpu/engine/block.cpp). Drafted blocks have separate KV blocks; a request's own hold context only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.block_chain import BlockChain
from faser_trtllm.engine.cuda.block_conv import BlockConvolution
from faser_trtllm.engine.cuda.block_rows import BlockRows
from faser_trtllm.engine.cuda.decoder import UNSCALED
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.cuda.weights import BlockWeights, DeviceWeights, LayerWeights
from faser_trtllm.engine.gpu.batch import DeviceBatch
from faser_trtllm.engine.gpu.decoder import Bounds, OneSegmentDecoder, Placement
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.ops.cuda.append_kv import QkvNorm, Rope
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.tensors import PagedKv

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BlockDecoder(OneSegmentDecoder):
    """Decoder (engine/gpu/decoder.py) over a block drafter's weights."""

    has_kv = True

    def __init__(
        self,
        weights: DeviceWeights,
        spec: EngineSpec,
        place: Placement,
        hidden_rows: HiddenRows,
        max_draft_len: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """hidden_rows: the target's. max_draft_len: limit on the places drafted. kv_dtype: of the KV cache; None: the
        weights' dtype."""
        self._ops, self._read, self.weights = place.ops, hidden_rows, weights
        block = weights.sizes["block"]
        self._block, self._size = block, block["block_size"]
        self._num_places = min(self._size - block["first_slot"], max(1, max_draft_len))
        place.runtime.wait()  # other streams do not wait for the default stream, which may still copy weights
        with place.runtime.on(place.partition):
            self._allocate(spec, place.runtime, kv_dtype)

    def _allocate(self, spec: EngineSpec, runtime: Runtime, kv_dtype: torch.dtype | None) -> None:
        import torch

        weights, sizes = self.weights, self.weights.sizes
        self._max_seq_len, self._max_batch_size = spec.max_seq_len, spec.max_batch_size
        self._eps = sizes["rms_norm_eps"]
        num_kv_heads, head_dim = sizes["num_kv_heads"], sizes["head_dim"]
        options: dict[str, Any] = {"dtype": weights.embedding.dtype, "device": runtime.device}
        self.batch = batch = DeviceBatch(runtime, spec, token_rows=self._read.own_rows)
        rows = self._rows = BlockRows(spec, self._block, runtime.device)
        cache = (
            spec.num_layers,
            2,
            spec.num_kv_blocks + rows.num_blocks,
            num_kv_heads,
            spec.tokens_per_block,
            head_dim,
        )
        # Zeroed: kernels multiply masked positions by zero, and NaN would survive that.
        self.cache = torch.zeros(cache, dtype=kv_dtype or weights.embedding.dtype, device=runtime.device)
        tables = (batch.block_table, batch.cu_q_lens, batch.kv_lens)
        own = (rows.block_table, rows.cu_q_lens, rows.kv_lens)
        self._context_kv = [PagedKv(k_cache, v_cache, *tables) for k_cache, v_cache in self.cache]
        self._block_kv = [PagedKv(k_cache, v_cache, *own) for k_cache, v_cache in self.cache]
        most = rows.token_ids.shape[0]
        heads = (most, sizes["num_heads"], head_dim)
        self._hidden = torch.zeros((most, sizes["hidden_size"]), **options)
        self._q, self._attended = torch.zeros(heads, **options), torch.zeros(heads, **options)
        # append_kv adds its epsilon: the divisor differs from 1 by less than a thousandth of bf16's last bit.
        self._ones = torch.ones((max(most, spec.max_num_tokens), UNSCALED), **options)
        self._no_q = torch.zeros((spec.max_num_tokens, 0, head_dim), **options)
        self._context = [context_kv(layer, sizes["num_heads"] * head_dim) for layer in weights.layers]
        self._cos, self._sin = (table[: spec.max_seq_len + self._size - 1] for table in (weights.cos, weights.sin))
        num_rows = spec.max_batch_size * self._num_places
        self._chain = BlockChain(self._ops, self._head, self._block, num_rows, weights.lm_head)
        self._first = torch.arange(0, num_rows, self._num_places, device=runtime.device)
        self._place = torch.zeros_like(self._first[0])  # the same for all requests, since none has pending drafts

    @property
    def weight_bytes(self) -> int:
        return self.weights.num_bytes

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        """Write keys and values of the rows. A request's last row has no hidden row of the target yet: the KV written
        at its position is never read, and is overwritten once the hidden row exists."""
        ops, weights, batch = self._ops, self.weights, self.batch
        kept = self._read.tensor.index_select(0, batch.token_rows[:rows])
        features = ops.rms_norm(ops.linear(kept, self._head.fc), self._head.hidden_norm, self._eps)
        rope = Rope(self._cos, self._sin, batch.positions[:rows])
        for layer, (weight, bias), kv in zip(weights.layers, self._context, self._context_kv, strict=True):
            norm = QkvNorm(self._ones[:rows], self._eps, bias, None, layer.k_norm)
            ops.append_kv(ops.linear(features, weight), rope, kv, self._no_q[:rows], norm)

    def write_logits(self, logits: Tensor) -> None:
        """See Decoder.write_logits. Only the first max_batch_size rows get logits, since no more requests draft."""
        count = min(logits.shape[0], self._max_batch_size)
        copies = self._rows.fill(self.batch, count)
        self._ops.copy_kv(copies, self.cache.view(-1, *self.cache.shape[2:]))
        self._run_block(count)
        first = self._block["first_slot"]
        drafting = self._hidden.view(-1, self._size, self._hidden.shape[1])[:count, first : first + self._num_places]
        rows = drafting.reshape(count * self._num_places, -1)
        self._chain.fill(self._ops.rms_norm(rows, self.weights.final_norm, self._eps))
        self._place.zero_()
        self._take_place(logits[:count], self._rows.token_ids.view(-1, self._size)[:count, 0])

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        """See Decoder.step. Moves on to the next place."""
        self._place += 1
        self._take_place(logits, self.batch.token_ids[:rows])

    def close(self) -> None:
        del self.batch, self.weights, self._read, self._rows, self.cache, self._context_kv, self._block_kv
        del self._hidden, self._q, self._attended, self._chain, self._context

    @property
    def _head(self) -> BlockWeights:
        assert isinstance(self.weights.head, BlockWeights), "these are no block drafter's weights"
        return self.weights.head

    def _run_block(self, count: int) -> None:
        """Run the blocks of `count` requests and leave their hidden rows in self._hidden."""
        import torch

        num_rows = count * self._size
        hidden, rows, weights = self._hidden[:num_rows], self._rows, self.weights
        torch.index_select(weights.embedding, 0, rows.token_ids[:num_rows], out=hidden)
        if self._block["embedding_scale"] != 1.0:
            hidden *= self._block["embedding_scale"]
        rope = Rope(self._cos, self._sin, rows.positions[:num_rows])
        for index, layer in enumerate(weights.layers):
            self._run_layer(index, layer, rope, hidden)

    def _run_layer(self, index: int, layer: LayerWeights, rope: Rope, hidden: Tensor) -> None:
        assert layer.input_norm is not None, "a block drafter's norms are not folded"
        assert layer.post_norm is not None, "a block drafter's norms are not folded"
        ops, kv, num_rows = self._ops, self._block_kv[index], hidden.shape[0]
        q, attended, ones = self._q[:num_rows], self._attended[:num_rows], self._ones[:num_rows]
        normed = ops.rms_norm(hidden, layer.input_norm, self._eps)
        conv = self._convolution(normed, layer.attention_conv_base, layer.attention_conv_delta)
        qkv = ops.linear(conv.before(normed), layer.qkv)
        ops.append_kv(qkv, rope, kv, q, QkvNorm(ones, self._eps, layer.qkv_bias, layer.q_norm, layer.k_norm))
        ops.verify_attention(
            q,
            kv,
            attended,
            window=self._block["windows"][index],
            is_causal=bool(self._block["causal"][index]),
            max_query_rows=self._size,
            max_kv_len=self._max_seq_len + self._size - 1,
        )
        conv.add(hidden, attended.view(num_rows, -1), layer.o, layer.o_bias)
        normed = ops.rms_norm(hidden, layer.post_norm, self._eps)
        conv = self._convolution(normed, layer.mlp_conv_base, layer.mlp_conv_delta)
        assert not isinstance(layer.gate_up, Mxfp4Matrices), "only experts are in MXFP4"
        assert not isinstance(layer.down, Mxfp4Matrices), "only experts are in MXFP4"
        gate_up = ops.linear(conv.before(normed), layer.gate_up)
        conv.add(hidden, ops.gated_silu(gate_up, ones, layer.gate_up_bias, 0.0), layer.down, layer.down_bias)

    def _convolution(self, normed: Tensor, base: Tensor | None, delta: Tensor | None) -> BlockConvolution:
        return BlockConvolution(self._ops, self._size, normed, base, delta)

    def _take_place(self, out: Tensor, before: Tensor) -> None:
        """Write the logits of each request's current place to `out`; before: the tokens before that place."""
        import torch

        rows = self._first[: out.shape[0]] + self._place
        rows = torch.where(self._place < self._num_places, rows, self._chain.last)
        self._chain.take(rows, before, out)


def context_kv(layer: LayerWeights, q_size: int) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a layer's qkv weight, and of its bias, that produce keys and values."""
    assert not isinstance(layer.qkv, ScaledRows), "block drafters are not quantized"
    return layer.qkv[q_size:], None if layer.qkv_bias is None else layer.qkv_bias[q_size:]
