"""The plugin faser::compact_rows: keeps the rows of the next segment and updates the ragged arrays."""

from __future__ import annotations

from typing import Any

from faser_trtllm.builder.plugins.descriptor import expect, launch_params, register_plugin, scalars, type_name
from faser_trtllm.builder.plugins.kernel_code import KernelCode
from faser_trtllm.ops.cuda.compact_rows import NUM_THREADS

PLUGIN_ID = "faser::compact_rows"


def register(trt: Any, trtp: Any, code: KernelCode) -> None:
    i32 = trt.DataType.INT32

    def describe(hidden, positions, rows, cu_q_lens, kv_lens, max_seq_len):  # type: ignore[no-untyped-def]
        type_name(trt, "hidden", hidden.dtype)
        expect(
            PLUGIN_ID,
            hidden=(hidden, hidden.dtype, 2),
            positions=(positions, i32, 1),
            rows=(rows, i32, 1),
            cu_q_lens=(cu_q_lens, i32, 1),
            kv_lens=(kv_lens, i32, 1),
        )
        num_kept = rows.shape_expr[0]
        kept_hidden = trtp.from_shape_expr((num_kept, hidden.shape_expr[1]), dtype=hidden.dtype)
        return kept_hidden, rows.like(), rows.like(), cu_q_lens.like(), kv_lens.like()

    def implement(hidden, positions, rows, cu_q_lens, kv_lens, max_seq_len, outputs, tactic):  # type: ignore[no-untyped-def]
        num_rows, hidden_size = hidden.shape_expr
        num_kept, num_requests = rows.shape_expr[0], kv_lens.shape_expr[0]
        # Both types have two bytes.
        sizes = (num_rows, num_kept, num_requests, hidden_size * 2, max_seq_len)
        params = launch_params(trtp, (trtp.max(num_kept, 1), 1, 1), NUM_THREADS)
        return "compact_rows", code.of("compact_rows"), params, scalars(trtp, sizes)

    register_plugin(trtp, PLUGIN_ID, describe, implement, num_outputs=5, attributes={"max_seq_len": int})
