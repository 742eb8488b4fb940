"""append_kv: apply rope to the queries and keys of new rows and write keys and values to a paged KV cache."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Argument, Dim3, Launcher
from faser_trtllm.ops.cuda.tensors import E4M3_MAX, expect, pointer_to, same_type, type_name
from faser_trtllm.ops.cuda.verify_attention import float_bits

if TYPE_CHECKING:
    from torch import Tensor

NUM_THREADS = 128
_PAIRS_PER_THREAD = 8
_ROW_MULTIPLE = 8  # entries that a thread loads at once


@dataclass(frozen=True, slots=True)
class AppendShape:
    """Sizes of one launch."""

    num_rows: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    tokens_per_block: int
    max_blocks_per_seq: int
    max_seq_len: int
    dtype: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class QkvNorm:
    """What turns a product of rows that were not normalised into their queries, keys and values.

    hidden [num_rows, hidden_size]: the rows that were multiplied; qkv is divided by the root mean square of each. Then
    bias [qkv's width] is added, and the heads of q and k are normed with q_norm and k_norm [head_dim]; None: the model
    has none. All of q_rotated's type; hidden_size a multiple of 8.
    """

    hidden: Tensor
    eps: float
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def kernel_name(shape: AppendShape, is_normed: bool = False) -> str:
    """The entry point for a shape's types. is_normed: of the kernel that takes a QkvNorm."""
    types = shape.dtype if shape.kv_dtype == shape.dtype else f"{shape.dtype}_{shape.kv_dtype}"
    return f"append_kv_normed_{types}" if is_normed else f"append_kv_{types}"


def grid(shape: AppendShape) -> Dim3:
    """Blocks of kernel_name(): rows, parts of a row."""
    threads = (shape.num_heads + 2 * shape.num_kv_heads) * (shape.head_dim // (2 * _PAIRS_PER_THREAD))
    return (shape.num_rows, -(-threads // NUM_THREADS), 1)


def scalars(shape: AppendShape, k_scale: float = 1.0, v_scale: float = 1.0) -> list[int]:
    """The int32 arguments between the inputs and the outputs, floats as their bits."""
    sizes = [shape.num_rows, shape.batch_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.num_blocks]
    sizes += [shape.tokens_per_block, shape.max_blocks_per_seq, shape.max_seq_len]
    return [*sizes, float_bits(k_scale), float_bits(v_scale)]


def launch(
    module: Launcher,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cu_q_lens: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_rotated: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    norm: QkvNorm | None = None,
    first_branch: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    stream: int = 0,
) -> None:
    """As append_kv_reference, into q_rotated [num_rows, num_heads, head_dim] and the caches; asynchronous on `stream`.

    Only addresses, shapes and types of the tensors are used. Raises InvalidArgumentError where no kernel fits.
    """
    tensors = (qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens, q_rotated, k_cache, v_cache)
    shape = shape_of(*tensors, is_normed=norm is not None)
    _check_scales(k_scale, v_scale)
    _check_branches(shape, norm, first_branch)
    sizes = scalars(shape, k_scale, v_scale)
    inputs: list[Tensor | None] = [qkv]
    if norm is None:
        inputs += [cos, sin, positions, cu_q_lens, block_table, kv_lens, k_cache, v_cache]
    else:
        _check_norm(shape, qkv, norm)
        inputs += [norm.hidden, norm.bias, norm.q_norm, norm.k_norm]
        inputs += [cos, sin, positions, cu_q_lens, block_table, kv_lens, first_branch]
        sizes += [norm.hidden.shape[1], float_bits(norm.eps)]
    if shape.num_rows == 0:
        return
    arguments: list[Argument] = [pointer_to(each) for each in inputs]
    arguments += [ctypes.c_int32(value) for value in sizes]
    arguments += [pointer_to(tensor) for tensor in (q_rotated, k_cache, v_cache)]
    kernel = kernel_name(shape, norm is not None)
    module.launch(kernel, grid(shape), (NUM_THREADS, 1, 1), arguments, stream)


def append_kv_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cu_q_lens: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_rotated: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    norm: QkvNorm | None = None,
    first_branch: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate q and k of every row (Hugging Face's half-split rope, in fp32) and write k and v at the rows' positions.

    qkv [num_rows, (num_heads + 2 num_kv_heads) * head_dim] bf16 or fp16; cos, sin fp32 [max_seq_len, head_dim / 2];
    positions int32 [num_rows]; cu_q_lens int32 [batch_size + 1]; block_table int32 [batch_size, max_blocks_per_seq];
    kv_lens int32 [batch_size], including the new rows; q_rotated [num_rows, num_heads, head_dim] of qkv's type;
    k_cache, v_cache [num_blocks, num_kv_heads, tokens_per_block, head_dim] of qkv's type, or e4m3 holding K / k_scale
    and V / v_scale, saturated at 448. Nothing is written for a row outside all requests, for a position outside [0,
    kv_len) or [0, max_seq_len), or in a block that does not exist; its query is rotated with the nearest position in
    range.

    norm: qkv is a product of rows that were not normalised, in fp32 where q_rotated is fp16, since it may leave that
    type's range; see QkvNorm. first_branch int32 [batch_size + 1], with a norm only: the branches of request i are the
    requests first_branch[i] to first_branch[i + 1], one row each; the rows of i that lie before a branch in the same
    block are written to the branch's block, too.
    """
    import torch

    tensors = (qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens, q_rotated, k_cache, v_cache)
    shape = shape_of(*tensors, is_normed=norm is not None)
    _check_scales(k_scale, v_scale)
    _check_branches(shape, norm, first_branch)
    if norm is not None:
        _check_norm(shape, qkv, norm)
        qkv = normed_qkv(qkv.float(), shape.num_heads, shape.num_kv_heads, norm)
    heads = qkv.float().view(shape.num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    angles = positions.long().clamp(0, shape.max_seq_len - 1)
    c, s = cos[angles][:, None], sin[angles][:, None]
    low, high = heads.chunk(2, -1)
    rotated = torch.cat((low * c - high * s, high * c + low * s), -1)
    q_rotated.copy_(rotated[:, : shape.num_heads])
    keys = rotated[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
    values = heads[:, shape.num_heads + shape.num_kv_heads :]
    if shape.kv_dtype == "e4m3":
        # The reciprocal in fp32, as in the kernel.
        k_inverse, v_inverse = torch.tensor([k_scale, v_scale], dtype=torch.float32).reciprocal().tolist()
        keys = (keys * k_inverse).clamp(-E4M3_MAX, E4M3_MAX)
        values = (values * v_inverse).clamp(-E4M3_MAX, E4M3_MAX)
    offsets, lens, table, places = cu_q_lens.tolist(), kv_lens.tolist(), block_table.tolist(), positions.tolist()
    for b in range(shape.batch_size):
        for row in range(max(0, offsets[b]), min(offsets[b + 1], shape.num_rows)):
            position = places[row]
            slot, offset = divmod(position, shape.tokens_per_block)
            if not 0 <= position < min(lens[b], shape.max_seq_len) or slot >= shape.max_blocks_per_seq:
                continue
            if not 0 <= table[b][slot] < shape.num_blocks:
                continue
            for owner in (b, *branches_before(first_branch, b, position, lens, shape.tokens_per_block)):
                if 0 <= (block := table[owner][slot]) < shape.num_blocks:
                    k_cache[block, :, offset] = keys[row].to(k_cache.dtype)
                    v_cache[block, :, offset] = values[row].to(v_cache.dtype)


def branches_before(
    first_branch: Tensor | None, request: int, position: int, kv_lens: list[int], tokens_per_block: int
) -> list[int]:
    """The request's branches behind a position of it in the same block, as append_kv_reference has them."""
    if first_branch is None:
        return []
    begin, end = (min(max(int(place), 0), len(kv_lens)) for place in first_branch[request : request + 2])
    return [
        branch
        for branch in range(begin, end)
        if position + 1 < kv_lens[branch] and position // tokens_per_block == (kv_lens[branch] - 1) // tokens_per_block
    ]


def normed_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int, norm: QkvNorm) -> Tensor:
    """qkv [num_rows, width] fp32 or fp64 as `norm` says, new and in its type."""
    import torch

    found = qkv * inverse_rms(norm.hidden.to(qkv.dtype), norm.eps)
    if norm.bias is not None:
        found += norm.bias.to(qkv.dtype)
    all_heads = num_heads + 2 * num_kv_heads
    heads = found.view(qkv.shape[0], all_heads, qkv.shape[1] // all_heads)
    parts = list(torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), 1))
    for place, weight in enumerate((norm.q_norm, norm.k_norm)):
        if weight is not None:
            parts[place] = parts[place] * inverse_rms(parts[place], norm.eps) * weight.to(qkv.dtype)
    return torch.cat(parts, 1).view(qkv.shape)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / the root mean square over the last dimension [..., 1]."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def shape_of(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cu_q_lens: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_rotated: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    is_normed: bool = False,
) -> AppendShape:
    """The sizes of the tensors; InvalidArgumentError names the tensor that does not fit the others."""
    if q_rotated.dim() != 3 or k_cache.dim() != 4 or cos.dim() != 2:
        raise InvalidArgumentError(
            f"q_rotated has {q_rotated.dim()}, k_cache {k_cache.dim()} and cos {cos.dim()} dimensions; "
            "they need 3 (rows, heads, head_dim), 4 (blocks, KV heads, tokens_per_block, head_dim) and 2"
        )
    num_rows, num_heads, head_dim = q_rotated.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = k_cache.shape
    max_seq_len, batch_size = cos.shape[0], kv_lens.shape[0]
    if head_dim % (2 * _PAIRS_PER_THREAD):
        raise InvalidArgumentError(f"head_dim is {head_dim}; it must be a multiple of {2 * _PAIRS_PER_THREAD}")
    if tokens_per_block == 0 or max_seq_len == 0:
        raise InvalidArgumentError(
            f"tokens_per_block is {tokens_per_block} and max_seq_len {max_seq_len}; both must be at least 1"
        )
    dtype, kv_dtype = type_name("q_rotated", q_rotated), type_name("k_cache", k_cache)
    if dtype not in ("bf16", "fp16"):
        raise InvalidArgumentError(f"q_rotated has type {dtype}; it must be bf16 or fp16")
    if kv_dtype not in (dtype, "e4m3"):
        raise InvalidArgumentError(f"k_cache has type {kv_dtype}; it must be q_rotated's, {dtype}, or e4m3")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    expect("qkv", qkv, (num_rows, width), "fp32" if is_normed and dtype == "fp16" else dtype)
    expect("cos", cos, (max_seq_len, head_dim // 2), "fp32")
    same_type("sin", sin, cos)
    expect("positions", positions, (num_rows,), "int32")
    expect("kv_lens", kv_lens, (batch_size,), "int32")
    expect("cu_q_lens", cu_q_lens, (batch_size + 1,), "int32")
    expect("block_table", block_table, (batch_size, block_table.shape[-1]), "int32")
    expect("q_rotated", q_rotated, (num_rows, num_heads, head_dim), dtype)
    expect("k_cache", k_cache, (num_blocks, num_kv_heads, tokens_per_block, head_dim), kv_dtype)
    same_type("v_cache", v_cache, k_cache)
    return AppendShape(
        num_rows,
        batch_size,
        num_heads,
        num_kv_heads,
        head_dim,
        num_blocks,
        tokens_per_block,
        block_table.shape[-1],
        max_seq_len,
        dtype,
        kv_dtype,
    )


def _check_norm(shape: AppendShape, qkv: Tensor, norm: QkvNorm) -> None:
    if norm.hidden.dim() != 2 or norm.hidden.shape[1] % _ROW_MULTIPLE:
        raise InvalidArgumentError(
            f"hidden has shape {list(norm.hidden.shape)}; it must be rows whose size is a multiple of {_ROW_MULTIPLE}"
        )
    expect("hidden", norm.hidden, (shape.num_rows, norm.hidden.shape[1]), shape.dtype)
    weights = (("bias", norm.bias, qkv.shape[1]), ("q_norm", norm.q_norm, shape.head_dim))
    for name, weight, size in (*weights, ("k_norm", norm.k_norm, shape.head_dim)):
        if weight is not None:
            expect(name, weight, (size,), shape.dtype)


def _check_branches(shape: AppendShape, norm: QkvNorm | None, first_branch: Tensor | None) -> None:
    if first_branch is None:
        return
    if norm is None:
        raise InvalidArgumentError("first_branch is given without a norm, and only those kernels take it; leave it out")
    expect("first_branch", first_branch, (shape.batch_size + 1,), "int32")


def _check_scales(k_scale: float, v_scale: float) -> None:
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not (value > 0 and math.isfinite(value)):
            raise InvalidArgumentError(f"{name} is {value}; it must be finite and above 0")
