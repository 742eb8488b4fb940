"""References of ops/cuda/experts/route_rows.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes


def route_rows_reference(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    num_used: Tensor,
    choice: Choice,
    is_first: bool,
    routes: Routes,
) -> None:
    """Find the experts of the first num_used [1] rows of x [n, width], and sort their pairs by expert; in numpy.

    router [num_outputs, width]: a row per expert, and then others, whose logits are computed as well. bias
    [num_outputs] or None. is_first: the layer is a pass's first, so num_distinct starts at 0.
    """
    used, top_k = min(max(int(num_used[0]), 0), x.shape[0]), choice.top_k
    products = (x[:used].double() @ router.double().t()).float()
    routes.logits[:used] = products if bias is None else products + bias.float()
    logits = routes.logits[:used, : choice.num_experts].numpy()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    experts = np.sort(order, axis=1).astype(np.int32)
    shifted = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    taken = np.take_along_axis(shifted, experts.astype(np.int64), 1)
    weights = taken / (shifted if choice.over_all else taken).sum(1, keepdims=True)
    routes.experts.numpy()[:used], routes.weights.numpy()[:used] = experts, weights
    pairs = np.argsort(experts.reshape(-1), kind="stable")
    places = np.empty_like(pairs)
    places[pairs] = np.arange(pairs.size)
    routes.places.numpy()[:used] = places.reshape(used, top_k)
    rows = routes.rows.numpy()
    rows[:] = 0
    rows[: pairs.size] = pairs // top_k
    counts = np.bincount(experts.reshape(-1), minlength=choice.num_experts)
    routes.counts.numpy()[:], routes.ends.numpy()[:] = counts, np.cumsum(counts)
    if is_first:
        routes.num_distinct.zero_()
    routes.num_distinct.add_(int(np.count_nonzero(counts)))
