"""Token trees: rows next to a request's chain of drafts, for what the target may say instead of a draft.

A branch is one token in the place of a draft. Where the chain's test ends with just that token, the branch's row is the
row after it, run one step early, and yields one token more. So nothing but the time of a row hangs on a branch: the
test is the chain's own, in every sampling mode, and the text is what it would have been.

Which rows a pass has may depend on anything, so a branch may also take the row of a draft that is less likely to be
reached: the draft stays pending. Without a rule with prices it does, and a pass has as many rows as without branches.

A branch has a slot and a KV block of its own, after those of the requests. Its row of the block table is its request's
up to the block that holds its place; of that block it gets what was there before the pass, and in the pass the KV of
the chain before it. So its row attends to the same values in the same order as a row of the chain would.
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
"""Copies KV between blocks of the target: [4, n] int32, as CpuEngine.copy_kv has it, before what it runs next."""

COST_ROWS = 2.0  # what a branch costs, in rows: its own, and about another for copies and host work
SLOPE_ROWS = 8  # over which a row's cost is averaged, since passes cost by stairs


class BranchRows:
    """Adds branches to a pass, and takes what they yield."""

    def __init__(
        self,
        spec: EngineSpec,
        copy_kv: CopyKv,
        sampling: SamplingTable,
        block_table: npt.NDArray[np.int32],
        num_branches: int,
        max_draft_len: int,
    ) -> None:
        """block_table [max_batch_size + max_num_branches, max_blocks_per_seq]: the last rows are written here.
        num_branches: of a request at most."""
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
        """num_pending, num_verified [num_requests]: pending drafts, and those that have rows, which is lowered in place
        where branches take these. verification: a rule with prices picks those that pay, next to the drafts' rows.

        Guided requests, and those that keep rows, get none. Nor do requests that run their tokens again after they were
        preempted: their drafts are still pending, but have no KV blocks yet."""
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
        """The batch with a row per branch, whose slots and blocks are made ready."""
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
        """Copy the KV of the branches that gave a token to their requests' blocks."""
        if not followed.size:
            return
        requests = branches.requests[followed]
        blocks, offsets = np.divmod(rows.num_tokens[requests] + branches.places[followed], self._spec.tokens_per_block)
        own = (self._spec.num_blocks + followed).astype(np.int32)
        self._copy_kv(np.stack([own, self._block_table[rows.slots[requests], blocks], offsets, offsets + 1]))
