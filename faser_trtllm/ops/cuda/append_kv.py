"""append_kv: apply rope to the queries and keys of new rows and write keys and values to a paged KV cache."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Argument, Dim3, Launcher
from faser_trtllm.ops.cuda.tensors import (
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

    cos: Tensor  # fp32 [max_seq_len, head_dim / 2], like sin
    sin: Tensor
    positions: Tensor  # int32 [num_rows]


@dataclass(frozen=True, slots=True)
class QkvNorm:
    """The arguments that turn a qkv product of rows that were not normalized into queries, keys and values.

    qkv is divided by the root mean square of each row of `hidden`, `bias` is added, and the heads of q and k are normed
    with q_norm and k_norm. All tensors have q_rotated's type; None: the model has no such tensor.
    """

    hidden: Tensor  # [num_rows, hidden_size], the rows that were multiplied; hidden_size is a multiple of 8
    eps: float
    bias: Tensor | None = None  # [qkv's width]
    q_norm: Tensor | None = None  # [head_dim], like k_norm
    k_norm: Tensor | None = None


def kernel_name(shape: AppendShape, is_normed: bool = False) -> str:
    """Return the entry point for a shape's types. is_normed: the kernel takes a QkvNorm."""
    return f"append_kv_normed_{shape.types}" if is_normed else f"append_kv_{shape.types}"


def grid(shape: AppendShape) -> Dim3:
    """Return the grid of kernel_name(): rows x parts of a row."""
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
    """Launch the kernel, asynchronously. lab/reference/cuda/append_kv.py says what it computes.

    The host reads only addresses, shapes and types of the tensors. Raises InvalidArgumentError if no kernel fits.
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


def shape_of(qkv: Tensor, rope: Rope, kv: PagedKv, q_rotated: Tensor, *, is_normed: bool = False) -> AppendShape:
    """Return the sizes of the tensors; raise InvalidArgumentError, naming the tensor, if one does not fit the rest."""
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
