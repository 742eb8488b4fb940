"""The plugin faser::append_kv: applies rope to new rows, and writes their keys and values to a paged cache."""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.plugins.descriptor import constant, expect, launch_params, register_plugin, scalars, type_name
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import append_kv

PLUGIN_ID = "faser::append_kv"


def register(trt: Any, trtp: Any, code: KernelCode) -> None:
    i32, fp32 = trt.DataType.INT32, trt.DataType.FLOAT

    def describe(qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens, k_cache, v_cache):  # type: ignore[no-untyped-def]
        type_name(trt, "qkv", qkv.dtype)
        expect(
            PLUGIN_ID,
            qkv=(qkv, qkv.dtype, 2),
            cos=(cos, fp32, 2),
            sin=(sin, fp32, 2),
            positions=(positions, i32, 1),
            cu_q_lens=(cu_q_lens, i32, 1),
            block_table=(block_table, i32, 2),
            kv_lens=(kv_lens, i32, 1),
            k_cache=(k_cache, qkv.dtype, 4),
            v_cache=(v_cache, qkv.dtype, 4),
        )
        _, num_kv_heads, _, head_dim = k_cache.shape_expr
        num_heads = qkv.shape_expr[1] // head_dim - num_kv_heads * 2
        q_rotated = trtp.from_shape_expr((qkv.shape_expr[0], num_heads, head_dim), dtype=qkv.dtype)
        # Not aliased(), which lets TensorRT copy the cache. Both have one address, and only new rows are written.
        return q_rotated, k_cache.like(), v_cache.like()

    def implement(  # type: ignore[no-untyped-def]
        qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens, k_cache, v_cache, outputs, tactic
    ):
        num_blocks, num_kv_heads, tokens_per_block, head_dim = k_cache.shape_expr
        width, num_kv_heads = constant("qkv's width", qkv.shape_expr[1]), constant("num_kv_heads", num_kv_heads)
        head_dim = constant("head_dim", head_dim)
        if head_dim % 16 or width % head_dim or width // head_dim <= 2 * num_kv_heads:
            raise InvalidArgumentError(
                f"head_dim is {head_dim} and qkv {width} wide with {num_kv_heads} KV heads; head_dim must be a "
                "multiple of 16, and qkv (num_heads + 2 * num_kv_heads) * head_dim wide"
            )
        dtype = type_name(trt, "qkv", qkv.dtype)
        shape = append_kv.AppendShape(
            num_rows=qkv.shape_expr[0],
            batch_size=kv_lens.shape_expr[0],
            num_heads=width // head_dim - 2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            max_blocks_per_seq=block_table.shape_expr[1],
            max_seq_len=cos.shape_expr[0],
            dtype=dtype,
            kv_dtype=dtype,
        )
        params = launch_params(trtp, append_kv.grid(shape), append_kv.NUM_THREADS)
        return append_kv.kernel_name(shape), code.of("append_kv"), params, scalars(trtp, append_kv.scalars(shape))

    register_plugin(trtp, PLUGIN_ID, describe, implement, num_outputs=3)
