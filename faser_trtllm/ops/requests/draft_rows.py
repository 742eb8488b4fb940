"""The rows of a draft model's first pass: what it has not seen of the requests that have a part in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.ops.arrays import Int32Array, int32_addresses


class DraftRows(NamedTuple):
    """The requests that have rows, a column each [num] int32. requests: indices into the step's. Rows are those of the
    tokens [first, end), of which the last num_logit_rows have logits: 1 for a request that drafts, num_new tokens after
    num_pending drafts that follow num_tokens committed ones."""

    requests: Int32Array
    slots: Int32Array
    first: Int32Array
    end: Int32Array
    num_logit_rows: Int32Array
    num_tokens: Int32Array
    num_pending: Int32Array
    num_new: Int32Array


def draft_rows(rows: ScheduledRequests, num_pending: Int32Array, max_num_rows: int, *, is_head: bool) -> DraftRows:
    """num_pending [num_requests] int32: with the drafts that other drafters made in this step.

    A request drafts once it decodes, and a request whose rows do not fit into max_num_rows gets those that do. Prompts
    are followed, by a head as far as the target has come: its rows need the target's hidden row of the position before,
    and end with the last committed token.
    """
    out = np.empty((len(DraftRows._fields), len(rows)), np.int32)
    columns = int32_addresses(
        rows.slots,
        rows.num_tokens,
        rows.num_computed,
        rows.num_draft_computed,
        num_pending,
        rows.drafters,
        rows.num_new_tokens,
        rows.max_model_drafts,
        out,
    )
    num = native.library().faser_draft_rows(len(rows), *columns[:-1], is_head, max_num_rows, columns[-1])
    return DraftRows(*out[:, :num])


def draft_rows_reference(
    rows: ScheduledRequests, num_pending: Int32Array, max_num_rows: int, *, is_head: bool
) -> DraftRows:
    """draft_rows in a plain loop."""
    found: list[tuple[int, ...]] = []
    progress = rows.num_tokens, rows.num_computed, rows.num_draft_computed, num_pending
    columns = (rows.slots, *progress, rows.drafters, rows.num_new_tokens, rows.max_model_drafts)
    for index, (slot, known, target, first, pending, drafters, num_rows, wanted) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        if not drafters & (1 << native.BY_MODEL):
            continue
        num_new = 0
        if target == known - 1:  # it decodes
            num_new = wanted - pending
            if num_new <= 0:
                continue
            end = known if is_head else known + pending
        elif is_head:
            end = target + 1 if target else 0
        else:
            end = target + num_rows
        if end - first > max_num_rows:
            end, num_new = first + max_num_rows, 0
        if end <= first or (is_head and end < 2):
            continue
        max_num_rows -= end - first
        found.append((index, slot, first, end, int(num_new > 0), known, pending, num_new))
    return DraftRows(*np.array(found, np.int32).reshape(-1, len(DraftRows._fields)).T)
