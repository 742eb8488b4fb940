"""The plugin faser::verify_attention_combine: combines the chunks that faser::verify_attention left into rows."""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.plugins.descriptor import constant, expect, launch_params, register_plugin, scalars, type_name
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.ops.cuda import verify_attention

PLUGIN_ID = "faser::verify_attention_combine"
_ATTRIBUTES = {"num_kv_heads": int, "tokens_per_block": int, "max_blocks_per_seq": int, "split_tokens": int}


def register(trt: Any, trtp: Any, code: KernelCode) -> None:
    i32, fp32 = trt.DataType.INT32, trt.DataType.FLOAT

    def describe(  # type: ignore[no-untyped-def]
        whole, workspace, cu_q_lens, kv_lens, num_kv_heads, tokens_per_block, max_blocks_per_seq, split_tokens
    ):
        type_name(trt, "whole", whole.dtype)
        expect(
            PLUGIN_ID,
            whole=(whole, whole.dtype, 3),
            workspace=(workspace, fp32, 1),
            cu_q_lens=(cu_q_lens, i32, 1),
            kv_lens=(kv_lens, i32, 1),
        )
        return (whole.like(),)

    def implement(  # type: ignore[no-untyped-def]
        whole,
        workspace,
        cu_q_lens,
        kv_lens,
        num_kv_heads,
        tokens_per_block,
        max_blocks_per_seq,
        split_tokens,
        outputs,
        tactic,
    ):
        num_heads = constant("num_heads", whole.shape_expr[1])
        head_dim = constant("head_dim", whole.shape_expr[2])
        dtype = type_name(trt, "whole", whole.dtype)
        shape = verify_attention.AttentionShape(
            num_rows=whole.shape_expr[0],
            batch_size=kv_lens.shape_expr[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=0,
            tokens_per_block=tokens_per_block,
            max_blocks_per_seq=max_blocks_per_seq,
            dtype=dtype,
            kv_dtype=dtype,
        )
        max_slots = workspace.shape_expr[0] // (num_heads * (head_dim + 2))
        params = launch_params(trtp, verify_attention.combine_grid(shape), verify_attention.COMBINE_THREADS)
        arguments = verify_attention.combine_scalars(shape, split_tokens, max_slots, 1.0)
        cubin = code.of("verify_attention", FASER_HEAD_DIM=head_dim)
        return verify_attention.combine_name(shape), cubin, params, scalars(trtp, arguments)

    register_plugin(trtp, PLUGIN_ID, describe, implement, num_outputs=1, attributes=_ATTRIBUTES)
