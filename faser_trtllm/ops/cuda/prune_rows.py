"""Early pruning's decision on the device, in one launch: how many rows each request keeps, and which rows stay."""

from __future__ import annotations

import ctypes
from typing import Any

from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer

STEM = "prune_rows"
NUM_THREADS = 512


def prune_rows(
    launcher: Launcher,
    scores: Any,
    places: Any,
    before: Any,
    cu_drafts: Any,
    starts: Any,
    rule: Any,
    num_hidden: int,
    kept: Any,
    rows: Any,
) -> None:
    """Compute ops.prune_rows.prune_rows_reference on the device; writes kept and rows.

    scores fp32 [num_drafts, num_candidates]; places int32, before fp32 [num_drafts]; cu_drafts int32 [num_requests +
    1]: the requests' ranges of drafts; starts int32 [num_requests]: the first of each request's num_hidden hidden rows;
    rule fp32 [5]: PruneRule.weights(). kept int32 [num_requests]; rows int32 [at least num_hidden]: the rows that stay,
    ascending, then -1, for compact_rows(). Contiguous device tensors; asynchronous.
    """
    num_drafts, num_candidates = scores.shape
    num_requests, num_listed = starts.shape[0], rows.shape[0]
    arguments = (
        pointer("scores", scores, "fp32", (None, None)),
        pointer("places", places, "int32", (num_drafts,)),
        pointer("before", before, "fp32", (num_drafts,)),
        pointer("cu_drafts", cu_drafts, "int32", (num_requests + 1,)),
        pointer("starts", starts, "int32", (num_requests,)),
        pointer("rule", rule, "fp32", (5,)),
        *map(ctypes.c_int32, (num_requests, num_drafts, num_candidates, num_hidden, num_listed)),
        pointer("kept", kept, "int32", (num_requests,)),
        pointer("rows", rows, "int32", (num_listed,)),
    )
    launcher.launch("prune_rows", (1, 1, 1), (NUM_THREADS, 1, 1), arguments)
