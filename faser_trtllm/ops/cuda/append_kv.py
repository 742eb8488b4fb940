"""append_kv: apply rope to the queries and keys of new rows and write keys and values to a paged KV cache."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Argument, Dim3, Launcher
from faser_trtllm.ops.cuda.tensors import (
    E4M3_MAX,
    PagedKv,
    PagedShape,
    bits_of,
    check_kv,
    expect,
    pointer_to,
    type_name,
)

if TYPE_CHECKING:
    from torch import Tensor

NUM_THREADS = 128
_PAIRS_PER_THREAD = 8
_ROW_MULTIPLE = 8  # entries that a thread loads at once


@dataclass(frozen=True, slots=True)
class AppendShape(PagedShape):
    """The sizes of a launch. max_seq_len: positions in rope's tables."""

    max_seq_len: int


class Rope(NamedTuple):
    """Rope's tables and the positions of the rows."""

    cos: Tensor  # fp32 [max_seq_len, head_dim / 2], as sin
    sin: Tensor
    positions: Tensor  # int32 [num_rows]


@dataclass(frozen=True, slots=True)
class QkvNorm:
    """The arguments that turn a product of rows that were not normalised into their queries, keys and values.

    qkv is divided by the root mean square of each row of `hidden`, `bias` is added, and the heads of q and k are normed
    with q_norm and k_norm. All tensors have q_rotated's type; None: the model has no such tensor.
    """

    hidden: Tensor  # [num_rows, hidden_size], the rows that were multiplied; hidden_size is a multiple of 8
    eps: float
    bias: Tensor | None = None  # [qkv's width]
    q_norm: Tensor | None = None  # [head_dim], as k_norm
    k_norm: Tensor | None = None


def kernel_name(shape: AppendShape, is_normed: bool = False) -> str:
    """Return the entry point for a shape's types. is_normed: of the kernel that takes a QkvNorm."""
    return f"append_kv_normed_{shape.types}" if is_normed else f"append_kv_{shape.types}"


def grid(shape: AppendShape) -> Dim3:
    """Return the blocks of kernel_name(): rows, parts of a row."""
    threads = (shape.num_heads + 2 * shape.num_kv_heads) * (shape.head_dim // (2 * _PAIRS_PER_THREAD))
    return (shape.num_rows, -(-threads // NUM_THREADS), 1)


def scalars(shape: AppendShape, k_scale: float = 1.0, v_scale: float = 1.0) -> list[int]:
    """Return the int32 arguments between the inputs and the outputs, floats as their bits."""
    sizes = [shape.num_rows, shape.batch_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.num_blocks]
    sizes += [shape.tokens_per_block, shape.max_blocks_per_seq, shape.max_seq_len]
    return [*sizes, bits_of(k_scale), bits_of(v_scale)]


def launch(
    module: Launcher,
    qkv: Tensor,
    rope: Rope,
    kv: PagedKv,
    q_rotated: Tensor,
    *,
    norm: QkvNorm | None = None,
    first_branch: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Run append_kv_reference by the kernel, asynchronously.

    Only addresses, shapes and types of the tensors are used. Raises InvalidArgumentError if no kernel fits.
    """
    shape = shape_of(qkv, rope, kv, q_rotated, is_normed=norm is not None)
    _check_scales(k_scale, v_scale)
    _check_branches(shape, norm, first_branch)
    sizes = scalars(shape, k_scale, v_scale)
    requests, caches = (kv.cu_q_lens, kv.block_table, kv.kv_lens), (kv.k_cache, kv.v_cache)
    if norm is None:
        inputs: tuple[Tensor | None, ...] = (qkv, *rope, *requests, *caches)
    else:
        _check_norm(shape, qkv, norm)
        weights = (norm.hidden, norm.bias, norm.q_norm, norm.k_norm)
        inputs = (qkv, *weights, *rope, *requests, first_branch)
        sizes += [norm.hidden.shape[1], bits_of(norm.eps)]
    if shape.num_rows == 0:
        return
    arguments: list[Argument] = [pointer_to(each) for each in inputs]
    arguments += [ctypes.c_int32(value) for value in sizes]
    arguments += [pointer_to(tensor) for tensor in (q_rotated, *caches)]
    kernel = kernel_name(shape, norm is not None)
    module.launch(kernel, grid(shape), (NUM_THREADS, 1, 1), arguments)


def append_kv_reference(
    qkv: Tensor,
    rope: Rope,
    kv: PagedKv,
    q_rotated: Tensor,
    *,
    norm: QkvNorm | None = None,
    first_branch: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate q and k of every row (Hugging Face's half-split rope, in fp32) and write k and v at the rows' positions.

    qkv [num_rows, (num_heads + 2 num_kv_heads) * head_dim] bf16 or fp16; q_rotated [num_rows, num_heads, head_dim] of
    qkv's type. A cache of e4m3 saturates at 448. Nothing is written for a row outside all requests, for a position
    outside [0, kv_len) or [0, max_seq_len), or in a block that does not exist; the query is then rotated with the
    nearest position in range.

    norm (see QkvNorm): qkv is a product of rows that were not normalised, in fp32 if q_rotated is fp16, whose range it
    may leave. first_branch int32 [batch_size + 1], with a norm only: the branches of request i are the requests
    first_branch[i] to first_branch[i + 1], one row each; the rows of i before a branch in the same block are written to
    the branch's block, too.
    """
    import torch

    shape = shape_of(qkv, rope, kv, q_rotated, is_normed=norm is not None)
    _check_scales(k_scale, v_scale)
    _check_branches(shape, norm, first_branch)
    if norm is not None:
        _check_norm(shape, qkv, norm)
        qkv = normed_qkv(qkv.float(), shape.num_heads, shape.num_kv_heads, norm)
    heads = qkv.float().view(shape.num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    angles = rope.positions.long().clamp(0, shape.max_seq_len - 1)
    c, s = rope.cos[angles][:, None], rope.sin[angles][:, None]
    low, high = heads.chunk(2, -1)
    rotated = torch.cat((low * c - high * s, high * c + low * s), -1)
    q_rotated.copy_(rotated[:, : shape.num_heads])
    keys = rotated[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
    values = heads[:, shape.num_heads + shape.num_kv_heads :]
    if shape.kv_dtype == "e4m3":
        # fp32, as in the kernel.
        k_inverse, v_inverse = torch.tensor([k_scale, v_scale], dtype=torch.float32).reciprocal().tolist()
        keys = (keys * k_inverse).clamp(-E4M3_MAX, E4M3_MAX)
        values = (values * v_inverse).clamp(-E4M3_MAX, E4M3_MAX)
    offsets, lens, table = kv.cu_q_lens.tolist(), kv.kv_lens.tolist(), kv.block_table.tolist()
    places = rope.positions.tolist()
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
                    kv.k_cache[block, :, offset] = keys[row].to(kv.k_cache.dtype)
                    kv.v_cache[block, :, offset] = values[row].to(kv.v_cache.dtype)


def branches_before(
    first_branch: Tensor | None, request: int, position: int, kv_lens: list[int], tokens_per_block: int
) -> list[int]:
    """Return the request's branches after one of its positions in the same block, as in append_kv_reference."""
    if first_branch is None:
        return []
    begin, end = (min(max(int(place), 0), len(kv_lens)) for place in first_branch[request : request + 2])
    return [
        branch
        for branch in range(begin, end)
        if position + 1 < kv_lens[branch] and position // tokens_per_block == (kv_lens[branch] - 1) // tokens_per_block
    ]


def normed_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int, norm: QkvNorm) -> Tensor:
    """Return new qkv [num_rows, width] in its type, fp32 or fp64, after `norm`."""
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
    """Return 1 / the root mean square over the last dimension [..., 1]."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def shape_of(qkv: Tensor, rope: Rope, kv: PagedKv, q_rotated: Tensor, *, is_normed: bool = False) -> AppendShape:
    """Return the sizes of the tensors; InvalidArgumentError names the tensor that does not fit the others."""
    if q_rotated.dim() != 3 or kv.k_cache.dim() != 4 or rope.cos.dim() != 2:
        raise InvalidArgumentError(
            f"q_rotated has {q_rotated.dim()}, k_cache {kv.k_cache.dim()} and cos {rope.cos.dim()} dimensions; "
            "they need 3 (rows, heads, head_dim), 4 (blocks, KV heads, tokens_per_block, head_dim) and 2"
        )
    num_rows, num_heads, head_dim = q_rotated.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = kv.k_cache.shape
    max_seq_len = rope.cos.shape[0]
    if head_dim % (2 * _PAIRS_PER_THREAD):
        raise InvalidArgumentError(f"head_dim is {head_dim}; it must be a multiple of {2 * _PAIRS_PER_THREAD}")
    if tokens_per_block == 0 or max_seq_len == 0:
        raise InvalidArgumentError(
            f"tokens_per_block is {tokens_per_block} and max_seq_len {max_seq_len}; both must be at least 1"
        )
    dtype = type_name("q_rotated", q_rotated, "bf16", "fp16")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    expect("qkv", qkv, "fp32" if is_normed and dtype == "fp16" else dtype, (num_rows, width))
    expect("cos", rope.cos, "fp32", (max_seq_len, head_dim // 2))
    expect("sin", rope.sin, "fp32", (max_seq_len, head_dim // 2))
    expect("positions", rope.positions, "int32", (num_rows,))
    expect("q_rotated", q_rotated, dtype, (num_rows, num_heads, head_dim))
    kv_dtype = check_kv(kv, dtype, head_dim)
    kv_sizes = (num_kv_heads, head_dim, num_blocks, tokens_per_block, kv.block_table.shape[-1])
    return AppendShape(num_rows, kv.kv_lens.shape[0], num_heads, *kv_sizes, dtype, kv_dtype, max_seq_len)


def _check_norm(shape: AppendShape, qkv: Tensor, norm: QkvNorm) -> None:
    if norm.hidden.dim() != 2 or norm.hidden.shape[1] % _ROW_MULTIPLE:
        raise InvalidArgumentError(
            f"hidden has shape {list(norm.hidden.shape)}; it must be rows whose size is a multiple of {_ROW_MULTIPLE}"
        )
    expect("hidden", norm.hidden, shape.dtype, (shape.num_rows, None))
    weights = (("bias", norm.bias, qkv.shape[1]), ("q_norm", norm.q_norm, shape.head_dim))
    for name, weight, size in (*weights, ("k_norm", norm.k_norm, shape.head_dim)):
        if weight is not None:
            expect(name, weight, shape.dtype, (size,))


def _check_branches(shape: AppendShape, norm: QkvNorm | None, first_branch: Tensor | None) -> None:
    if first_branch is None:
        return
    if norm is None:
        raise InvalidArgumentError("first_branch is given without a norm, and only those kernels take it; leave it out")
    expect("first_branch", first_branch, "int32", (shape.batch_size + 1,))


def _check_scales(k_scale: float, v_scale: float) -> None:
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not (value > 0 and math.isfinite(value)):
            raise InvalidArgumentError(f"{name} is {value}; it must be finite and above 0")
