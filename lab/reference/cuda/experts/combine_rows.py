"""References of ops/cuda/experts/combine_rows.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.experts.route_rows import Routes

if TYPE_CHECKING:
    from torch import Tensor


def combine_rows_reference(
    outputs: Tensor,
    routes: Routes,
    bias: Tensor | None,
    shared: Tensor | None,
    num_used: Tensor,
    hidden: Tensor,
) -> None:
    """Add to the first num_used [1] rows of hidden [n, width] their pairs' outputs [n * top_k, width], plus bias
    [num_experts, width], times their weights, in ascending order of the expert, and then shared [n, width] times the
    sigmoid of its gate, the last of a row's logits. Sums are in fp32 (fp64 for outputs of fp64), rounded once."""
    import torch

    used = min(max(int(num_used[0]), 0), hidden.shape[0])
    kind = torch.promote_types(outputs.dtype, torch.float32)
    sums = torch.zeros((used, hidden.shape[1]), dtype=kind)
    for j in range(routes.places.shape[1]):
        pairs = routes.places[:used, j].long()
        values = outputs[pairs].to(kind)
        if bias is not None:
            values += bias[routes.experts[:used, j].long()].to(kind)
        sums += routes.weights[:used, j, None] * values
    if shared is not None:
        sums += torch.sigmoid(routes.logits[:used, -1:]) * shared[:used].to(kind)
    hidden[:used] = (hidden[:used].to(kind) + sums).to(hidden.dtype)
