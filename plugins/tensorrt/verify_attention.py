"""The plugin faser::verify_attention: attention of ragged rows over a paged cache.

If the attribute split_tokens is not 0, rows with long contexts are left as partial results in the second output, and
faser::verify_attention_combine has to follow.
"""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.plugins.descriptor import constant, expect, launch_params, register_plugin, scalars, type_name
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import verify_attention

PLUGIN_ID = "faser::verify_attention"

# Tactics are positive numbers. 0: not autotuned.
TILE_ROWS = {0: 64, 1: 64, 2: 16}


def register(trt: Any, trtp: Any, code: KernelCode) -> None:
    i32, fp32 = trt.DataType.INT32, trt.DataType.FLOAT

    def workspace_values(q: Any, k_cache: Any, block_table: Any, split_tokens: int) -> Any:
        """Return verify_attention.choose_max_slots, symbolically, times the values of a slot."""
        longest = block_table.shape_expr[1] * k_cache.shape_expr[2]
        more_chunks = (longest + split_tokens // 2) // split_tokens - 1
        values = q.shape_expr[0] * q.shape_expr[1] * (q.shape_expr[2] + 2)
        return values + trtp.min(values * more_chunks, verify_attention.MAX_WORKSPACE_BYTES // 4)

    def describe(q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, split_tokens):  # type: ignore[no-untyped-def]
        type_name(trt, "q", q.dtype)
        expect(
            PLUGIN_ID,
            q=(q, q.dtype, 3),
            k_cache=(k_cache, q.dtype, 4),
            v_cache=(v_cache, q.dtype, 4),
            block_table=(block_table, i32, 2),
            cu_q_lens=(cu_q_lens, i32, 1),
            kv_lens=(kv_lens, i32, 1),
        )
        if split_tokens != 0:
            verify_attention.check_split_tokens(f"split_tokens of {PLUGIN_ID}", split_tokens)
        values = workspace_values(q, k_cache, block_table, split_tokens) if split_tokens else 1
        return q.like(), trtp.from_shape_expr((values,), dtype=fp32)

    def autotune(q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, split_tokens, outputs):  # type: ignore[no-untyped-def]
        # TensorRT would time tiles on arbitrary cu_q_lens, which may leave no work, so decide by the profile.
        num_rows, batch_size = (x.shape.opt[0] if x.shape.is_dynamic else x.shape[0] for x in (q, kv_lens))
        packed_rows = -(-num_rows // batch_size) * (q.shape[1] // k_cache.shape[1])
        values = type_name(trt, "q", q.dtype).upper()
        types = [values] * 3 + ["INT32"] * 3 + [values, "FLOAT"]
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", [2 if packed_rows <= 16 else 1])]

    def implement(  # type: ignore[no-untyped-def]
        q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, split_tokens, outputs, tactic
    ):
        num_rows, batch_size = q.shape_expr[0], kv_lens.shape_expr[0]
        num_blocks, num_kv_heads, tokens_per_block, head_dim = k_cache.shape_expr
        num_heads, num_kv_heads = constant("num_heads", q.shape_expr[1]), constant("num_kv_heads", num_kv_heads)
        head_dim = constant("head_dim", head_dim)
        if head_dim not in verify_attention.HEAD_DIMS:
            raise InvalidArgumentError(
                f"head_dim is {head_dim}; {PLUGIN_ID} has kernels for {verify_attention.HEAD_DIMS}, build with "
                "--backend tensorrt_rtx for others"
            )
        if num_heads % num_kv_heads:
            raise InvalidArgumentError(f"num_heads is {num_heads}; it must be a multiple of {num_kv_heads} KV heads")
        dtype = type_name(trt, "q", q.dtype)
        shape = verify_attention.AttentionShape(
            num_rows=num_rows,
            batch_size=batch_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            max_blocks_per_seq=block_table.shape_expr[1],
            dtype=dtype,
            kv_dtype=dtype,
        )
        tile_rows = TILE_ROWS[tactic]
        # verify_attention.grid, symbolically.
        padding = trtp.min(num_rows, batch_size) * (tile_rows - 1)
        more = verify_attention.more_blocks(shape) if split_tokens else 0
        blocks = (num_rows * shape.group + padding) // tile_rows + (1 + more)
        params = launch_params(trtp, (blocks, num_kv_heads, 1), verify_attention.block_threads(shape, tile_rows))
        values = workspace_values(q, k_cache, block_table, split_tokens) if split_tokens else 0
        slots, scale = values // (num_heads * (head_dim + 2)), verify_attention.default_scale(head_dim)
        arguments = verify_attention.scalars(shape, split_tokens, slots, False, scale, 1.0, 1.0)
        kernel = verify_attention.kernel_name(shape, tile_rows)
        return kernel, code.of("verify_attention", FASER_HEAD_DIM=head_dim), params, scalars(trtp, arguments)

    attributes = {"split_tokens": int}
    register_plugin(trtp, PLUGIN_ID, describe, implement, num_outputs=2, attributes=attributes, autotune=autotune)
