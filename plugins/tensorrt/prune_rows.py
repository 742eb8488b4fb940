"""The plugin faser::prune_rows: how many rows each request keeps after a boundary, and which rows stay."""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.plugins.descriptor import constant, expect, launch_params, register_plugin, scalars
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.ops.cuda.prune_rows import NUM_THREADS

PLUGIN_ID = "faser::prune_rows"


def register(trt: Any, trtp: Any, code: KernelCode) -> None:
    i32, fp32 = trt.DataType.INT32, trt.DataType.FLOAT

    def describe(scores, places, before, cu_drafts, starts, rule, positions):  # type: ignore[no-untyped-def]
        expect(
            PLUGIN_ID,
            scores=(scores, fp32, 2),
            places=(places, i32, 1),
            before=(before, fp32, 1),
            cu_drafts=(cu_drafts, i32, 1),
            starts=(starts, i32, 1),
            rule=(rule, fp32, 1),
            positions=(positions, i32, 1),
        )
        return starts.like(), positions.like()

    def implement(scores, places, before, cu_drafts, starts, rule, positions, outputs, tactic):  # type: ignore[no-untyped-def]
        num_drafts, num_candidates = scores.shape_expr[0], constant("num_candidates", scores.shape_expr[1])
        num_rows = positions.shape_expr[0]
        sizes = (starts.shape_expr[0], num_drafts, num_candidates, num_rows, num_rows)
        params = launch_params(trtp, (1, 1, 1), NUM_THREADS)
        return "prune_rows_of_positions", code.of("prune_rows"), params, scalars(trtp, sizes)

    register_plugin(trtp, PLUGIN_ID, describe, implement, num_outputs=2)
