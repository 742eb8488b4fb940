"""Token trees: rows next to a request's chain of drafts, for tokens that the target may choose instead of a draft.

A branch is one token in place of a draft. If rejection sampling ends the chain with just that token, the branch's row
is the row after it, run one step early, and yields one more token. A branch therefore affects only time: rejection
sampling looks at the chain alone, in every sampling mode, and the output stays the same.

A pass may choose its rows freely, so a branch may also take the row of a draft that is less likely to be reached; the
draft stays pending. If the policy gives no VerificationRule, which knows prices, it always does, and a pass has as many
rows as without branches.

A branch has its own slot and KV block, after those of the requests. Its row of the block table is its request's up to
the block of its position. Into its own block are copied the KV from before the pass and, in the pass, the chain's KV
before it. So its row attends to the same values in the same order as a row of the chain would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.decision import VerificationLengths
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.ops.best_slots import VerificationRule
from faser_trtllm.ops.requests.pick_branches import BranchPicker, prior_acceptance
from faser_trtllm.sampling.rejection import BranchTokens
from faser_trtllm.sampling.table import SamplingTable

CopyKv = Callable[[npt.NDArray[np.int32]], None]
"""Copies KV between blocks of the target before its next work: [4, n] int32, see CpuEngine.copy_kv."""

COST_ROWS = 2.0  # cost of a branch in rows: its own row, and about one more for copies and host work
SLOPE_ROWS = 8  # rows over which a row's cost is averaged, since the cost of passes is a step function


class BranchRows:
    """Adds branches to a pass, and copies the KV of those that yield a token."""

    def __init__(
        self,
        spec: EngineSpec,
        copy_kv: CopyKv,
        sampling: SamplingTable,
        block_table: npt.NDArray[np.int32],
        num_branches: int,
        max_draft_len: int,
    ) -> None:
        """block_table [max_batch_size + max_num_branches, max_blocks_per_seq]: only this class writes its last
        max_num_branches rows. num_branches: maximum per request."""
        self._spec = spec
        self._copy_kv = copy_kv
        self._sampling = sampling
        self._block_table = block_table
        self._picker = BranchPicker(num_branches, spec.max_num_branches)
        self._prior = prior_acceptance(max_draft_len)

    def pick(
        self,
        rows: ScheduledRequests,
        num_pending: Int32Array,
        num_verified: Int32Array,
        verification: VerificationLengths | None,
    ) -> BranchTokens | None:
        """Return the branches of a pass, or None.

        num_pending, num_verified [num_requests]: pending drafts, and those that have rows. num_verified is lowered in
        place where branches take their rows. verification: a VerificationRule adds the branches that pay.
        Guided requests and those that keep rows get none. Neither do requests that run their tokens again after
        preemption: their drafts are still pending, but have no KV blocks yet."""
        n, guided = rows.num_decoding, self._sampling.guided.slots
        may_branch = [not request.keeps_rows and request.slot not in guided for request in rows.requests[:n]]
        asked = num_pending[:n] * (np.array(may_branch, bool) & (rows.num_drafts[:n] > 0))
        lengths = num_verified[:n]
        acceptance, min_worth, room = self._prior, None, self._spec.max_num_branches
        if isinstance(verification, VerificationRule):
            num_slots = int(lengths[asked > 0].sum())
            acceptance, min_worth = verification.acceptance, COST_ROWS * verification.row_price(num_slots, SLOPE_ROWS)
            room = max(0, self._spec.max_num_tokens - int(rows.num_new_tokens.sum() + lengths.sum()))
        columns = (rows.slots[:n], rows.num_tokens[:n], asked, lengths)
        found = self._picker.pick(self._sampling.array, *columns, acceptance, min_worth, room)
        return BranchTokens(*found) if found.size else None

    def add(self, batch: RaggedBatch, rows: ScheduledRequests, branches: BranchTokens) -> RaggedBatch:
        """Return the batch with one row per branch, and prepare the branches' slots and blocks."""
        table, spec, parents = self._block_table, self._spec, branches.requests
        n, size = parents.size, self._spec.tokens_per_block
        positions = rows.num_tokens[parents] + branches.places
        columns = (rows.slots[parents], positions, rows.num_computed[parents])
        copies = []
        for branch, (slot, position, computed) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            block = position // size
            own = spec.num_blocks + branch
            row = table[spec.max_batch_size + branch]
            row[:block] = table[slot, :block]
            row[block] = own
            if computed > block * size:
                copies.append((table[slot, block], own, 0, computed - block * size))
        if copies:
            self._copy_kv(np.ascontiguousarray(np.array(copies, np.int32).T))
        new_rows = batch.num_rows + np.arange(n, dtype=np.int32)
        branch_slots = spec.max_batch_size + np.arange(n, dtype=np.int32)
        return replace(
            batch,
            slots=np.concatenate([batch.slots, branch_slots]),
            cu_rows=np.concatenate([batch.cu_rows, new_rows + 1]),
            token_ids=np.concatenate([batch.token_ids, branches.token_ids]),
            positions=np.concatenate([batch.positions, positions]),
            logit_rows=np.concatenate([batch.logit_rows, new_rows]),
            branch_parents=parents,
        )

    def copy_followed(self, rows: ScheduledRequests, branches: BranchTokens, followed: npt.NDArray[np.intp]) -> None:
        """Copy the KV of the branches that yielded a token to their requests' blocks."""
        if not followed.size:
            return
        requests = branches.requests[followed]
        blocks, offsets = np.divmod(rows.num_tokens[requests] + branches.places[followed], self._spec.tokens_per_block)
        own = (self._spec.num_blocks + followed).astype(np.int32)
        self._copy_kv(np.stack([own, self._block_table[rows.slots[requests], blocks], offsets, offsets + 1]))
