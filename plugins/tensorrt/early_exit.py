"""The plugin faser::early_exit: scores of a few candidates from the hidden rows of a segment."""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.plugins.descriptor import constant, expect, launch_params, register_plugin, scalars, type_name
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.early_exit import MAX_CANDIDATES, NUM_THREADS
from faser_trtllm.ops.cuda.tensors import bits_of

PLUGIN_ID = "faser::early_exit"


def register(trt: Any, trtp: Any, code: KernelCode) -> None:
    i32, fp32 = trt.DataType.INT32, trt.DataType.FLOAT

    def describe(hidden, rows, final_norm, lm_head, candidates, drafted_place, rms_norm_eps):  # type: ignore[no-untyped-def]
        type_name(trt, "hidden", hidden.dtype)
        expect(
            PLUGIN_ID,
            hidden=(hidden, hidden.dtype, 2),
            rows=(rows, i32, 1),
            final_norm=(final_norm, hidden.dtype, 1),
            lm_head=(lm_head, hidden.dtype, 2),
            candidates=(candidates, i32, 2),
            drafted_place=(drafted_place, i32, 1),
        )
        num_rows, num_candidates = candidates.shape_expr
        scores = trtp.from_shape_expr((num_rows, num_candidates), dtype=fp32)
        return scores, trtp.from_shape_expr((num_rows,), dtype=i32), trtp.from_shape_expr((num_rows,), dtype=fp32)

    def implement(  # type: ignore[no-untyped-def]
        hidden, rows, final_norm, lm_head, candidates, drafted_place, rms_norm_eps, outputs, tactic
    ):
        num_rows, num_candidates = candidates.shape_expr[0], constant("num_candidates", candidates.shape_expr[1])
        if not 1 <= num_candidates <= MAX_CANDIDATES:
            raise InvalidArgumentError(f"num_candidates is {num_candidates}; it must be 1 to {MAX_CANDIDATES}")
        num_hidden_rows, hidden_size = hidden.shape_expr
        sizes = (num_rows, num_hidden_rows, hidden_size, lm_head.shape_expr[0], num_candidates, bits_of(rms_norm_eps))
        kernel = f"early_exit_{type_name(trt, 'hidden', hidden.dtype)}"
        params = launch_params(trtp, (num_rows, 1, 1), NUM_THREADS)
        return kernel, code.of("early_exit"), params, scalars(trtp, sizes)

    register_plugin(trtp, PLUGIN_ID, describe, implement, num_outputs=3, attributes={"rms_norm_eps": float})
