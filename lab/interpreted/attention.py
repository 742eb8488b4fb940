"""Rotary embedding, cache update and attention layers in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.network.layers import Layer

if TYPE_CHECKING:
    import torch

Operation = Callable[..., Any]
Constants = tuple["torch.Tensor | None", ...]


def rotary_embedding(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    """Rotate half-split, as Hugging Face does: x [batch, heads, rows, head_dim], tables [positions, head_dim / 2],
    position ids [batch, rows]. It has not been checked on a GPU that IRotaryEmbeddingLayer computes the same."""
    import torch

    layer.require(interleaved=False)
    if len(layer.inputs) != 4 or None in layer.inputs:
        raise layer.unknown("rotary embedding without position ids")
    rotary_dim = layer.parameters["rotary_embedding_dim"]

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != rotary_dim:
            raise ValueError(f"{layer.name}: rotary_embedding_dim is {rotary_dim}, heads are {x.shape[-1]} long")
        index = positions.long()
        cos, sin = cos.float()[index].unsqueeze(1), sin.float()[index].unsqueeze(1)
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(dtype)

    return run


def kv_cache_update(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    """Write request b's rows of `update` [rows, heads, head_dim], cu_lens[b] to cu_lens[b + 1], to cache[b, :,
    write_idx[b] :] in place. Rows out of bounds are ignored."""
    layer.require(cache_mode="LINEAR", update_form="PACKED_NHD")

    def run(cache: torch.Tensor, update: torch.Tensor, write_idx: torch.Tensor, cu_lens: torch.Tensor) -> torch.Tensor:
        starts, ends = write_idx.tolist(), cu_lens.tolist()
        if len(starts) != cache.shape[0] or len(ends) != len(starts) + 1 or ends[0] != 0 or ends[-1] > len(update):
            raise ValueError(
                f"{layer.name}: cache rows {cache.shape[0]}, write_idx {starts}, update lengths {ends} and "
                f"{len(update)} rows do not fit"
            )
        for b, start in enumerate(starts):
            row = ends[b]
            count = min(ends[b + 1] - row, cache.shape[2] - start)
            if count > 0 and start >= 0:
                cache[b, :, start : start + count] = update[row : row + count].transpose(0, 1)
        return cache

    return run


def attention(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    """Compute softmax(q k^T) v without a scale.

    q [batch, heads, query_rows, head_dim], k and v [batch, kv_heads, keys, head_dim], of which the first
    key_value_lengths[b] are valid. A query that sees no key gives NaN, which must not be read.
    """
    import torch

    layer.require(
        norm_op="SOFTMAX",
        causal_kind="NONE",
        query_form="PADDED_BHND",
        key_value_form="PADDED_BHND",
        query_lengths=None,
    )
    mask_name, lengths_name = layer.parameters["mask"], layer.parameters["key_value_lengths"]
    if any(name not in (None, mask_name, lengths_name) for name in layer.inputs[3:]):
        raise layer.unknown(f"one of the inputs {layer.inputs}")
    mask_at = layer.inputs.index(mask_name) if mask_name else None
    lengths_at = layer.inputs.index(lengths_name) if lengths_name else None

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = inputs[:3]
        batch, num_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_keys = k.shape[1], k.shape[2]
        if k.shape[0] != batch or num_heads % num_kv_heads:
            raise ValueError(f"{layer.name}: q {list(q.shape)} and k {list(k.shape)} do not fit")
        mask = None if mask_at is None else inputs[mask_at].expand(batch, 1, num_queries, num_keys)
        if mask is not None and mask.dtype is not torch.bool:
            raise layer.unknown(f"a mask of {mask.dtype}")
        lengths = [num_keys] * batch if lengths_at is None else inputs[lengths_at].tolist()
        group = num_heads // num_kv_heads
        result = torch.full_like(q, float("nan"))
        for b, length in enumerate(lengths):
            if not 0 <= length <= num_keys:
                raise ValueError(f"{layer.name}: key_value_lengths has {length}, there are {num_keys} keys")
            if length == 0:
                continue
            grouped = q[b].float().reshape(num_kv_heads, group * num_queries, head_dim)
            scores = grouped @ k[b, :, :length].float().mT
            if mask is not None:
                hidden = ~mask[b, :, :, :length].repeat(1, group, 1)
                scores = scores.masked_fill(hidden, float("-inf"))
            mixed = scores.softmax(-1) @ v[b, :, :length].float()
            result[b] = mixed.reshape(num_heads, num_queries, head_dim).to(dtype)
        return result

    return run
