"""Reference of plugins/cpu/draft_rows.cpp."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.counts import DRAFTERS, Int32Array
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.ops.requests.fill_rows import DraftRows


def draft_rows_reference(rows: ScheduledRequests, num_pending: Int32Array, max_num_rows: int, kind: int) -> DraftRows:
    """Return the DraftRows of RowFiller.fill_draft(), in a plain loop."""
    found: list[tuple[int, ...]] = []
    progress = rows.num_tokens, rows.num_computed, rows.num_draft_computed, num_pending
    columns = (rows.slots, *progress, rows.counts[DRAFTERS], rows.num_new_tokens, rows.max_model_drafts)
    for index, (slot, known, target, first, pending, drafters, num_rows, wanted) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        if not drafters & (1 << native.BY_MODEL):
            continue
        num_new, end = 0, target
        if target == known - 1:  # the request decodes
            num_new = wanted - pending
            if num_new <= 0 or (kind == native.DRAFT_BLOCK and pending):
                continue
            end = known + pending if kind == native.DRAFT_MODEL else known
        elif kind == native.DRAFT_HEAD:
            end = target + 1 if target else 0
        elif kind == native.DRAFT_MODEL:
            end = target + num_rows
        if end - first > max_num_rows:
            end, num_new = first + max_num_rows, 0
        if end <= first or (kind == native.DRAFT_HEAD and end < 2):
            continue
        max_num_rows -= end - first
        found.append((index, slot, first, end, int(num_new > 0), known, pending, num_new))
    return DraftRows(*np.array(found, np.int32).reshape(-1, len(DraftRows._fields)).T)
