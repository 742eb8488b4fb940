"""Token trees: rows beside a request's chain of drafts, for what the target may say instead of a draft.

A branch is one token in the place of a draft. Where the chain's test ends with just that token, the branch's row is the
row behind it, run one step early, and yields one token more. So nothing but the time of a row hangs on a branch: the
test is the chain's own, in every sampling mode, and the text is what it would have been.

Which rows a pass has may depend on anything, so a branch may also take the row of a draft that is less likely to be
reached: the draft stays pending. Without a rule with prices it does, and a pass has as many rows as without branches.

A branch has a slot and a KV block of its own, behind those of the requests. Its row of the block table is its request's
up to the block that holds its place; of that block it gets what was there before the pass, and in the pass the KV of
the chain before it. So its row attends to the same values in the same order as a row of the chain would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import Frontier
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.core.value import value
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.ops.best_slots import FrontierRule
from faser_trtllm.ops.requests.pick_branches import Branches, BranchPicker, prior_acceptance
from faser_trtllm.sampling.rejection import BranchTokens
from faser_trtllm.sampling.table import SamplingTable

CopyKv = Callable[[npt.NDArray[np.int32]], None]
"""Copies KV between blocks of the target: [4, n] int32, as CpuEngine.copy_kv has it, before what it runs next."""

COST_ROWS = 2.0  # what a branch costs, in rows: its own, and about another for copies and host work
SLOPE_ROWS = 8  # over which a row's cost is averaged, since passes cost by stairs


@value
class Added:
    """The branches of a pass, a list per field. tested: which of the tested requests each belongs to. places: as
    Branches has them."""

    tested: Sequence[int]
    slots: Sequence[int]
    num_tokens: Sequence[int]
    places: Sequence[int]
    token_ids: Sequence[int]

    @property
    def tokens(self) -> BranchTokens:
        """What the sampler draws after, whose rows of logits are the last ones of the pass."""
        return BranchTokens(*(np.array(column, np.int32) for column in (self.tested, self.places, self.token_ids)))


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
        verified: Sequence[int],
        num_pending: Sequence[int],
        frontiers: list[int],
        frontier: Frontier | None,
    ) -> Branches | None:
        """Of the requests at indices of rows. num_pending: by index of rows; frontiers: rows of drafts, of those
        verified, lowered in place where branches take them. frontier: a rule with prices picks those that pay, beside
        the drafts' rows.

        Guided requests, and those that keep rows, get none. Nor do requests that run their tokens again after they were
        preempted: their drafts are still pending, but have no KV blocks yet."""
        guided, requests = self._sampling.guided.slots, rows.requests
        asked = [
            (entry, index)
            for entry, index in enumerate(verified)
            if num_pending[index]
            and rows.num_drafts[index]
            and rows.slots[index] not in guided
            and not requests[index].keeps_rows
        ]
        if not asked:
            return None
        lengths = [frontiers[entry] for entry, _ in asked]
        slots, known, pending = (
            [column[index] for _, index in asked] for column in (rows.slots, rows.num_tokens, num_pending)
        )
        acceptance, min_worth, room = self._prior, None, self._spec.max_num_branches
        if isinstance(frontier, FrontierRule):
            acceptance, min_worth = frontier.acceptance, COST_ROWS * frontier.row_price(sum(lengths), SLOPE_ROWS)
            room = max(0, self._spec.max_num_tokens - sum(rows.num_new_tokens) - sum(frontiers))
        found = self._picker.pick(self._sampling.array, slots, known, pending, lengths, acceptance, min_worth, room)
        if not found.requests:
            return None
        for (entry, _), length in zip(asked, found.num_verified, strict=True):
            frontiers[entry] = length
        return replace(found, requests=[asked[i][1] for i in found.requests])

    def add(
        self, batch: RaggedBatch, rows: ScheduledRequests, tested: Sequence[int], picked: Branches
    ) -> tuple[RaggedBatch, Added]:
        """tested: indices of rows, in the batch's order."""
        places = {index: place for place, index in enumerate(tested)}
        added = Added(
            [places[index] for index in picked.requests],
            [rows.slots[index] for index in picked.requests],
            [rows.num_tokens[index] for index in picked.requests],
            picked.places,
            picked.token_ids,
        )
        return self._extend(batch, added), added

    def copy_followed(self, added: Added, followed: Sequence[int]) -> None:
        """Copy the KV of the branches that gave a token to their requests' blocks."""
        if not followed:
            return
        size, first_block = self._spec.tokens_per_block, self._spec.num_blocks
        copies = np.zeros((4, len(followed)), np.int32)
        for place, branch in enumerate(followed):
            block, offset = divmod(added.num_tokens[branch] + added.places[branch], size)
            copies[:, place] = first_block + branch, self._block_table[added.slots[branch], block], offset, offset + 1
        self._copy_kv(copies)

    def _extend(self, batch: RaggedBatch, added: Added) -> RaggedBatch:
        """The batch with a row per branch, whose slots and blocks are made ready."""
        n, table, spec = len(added.slots), self._block_table, self._spec
        size = spec.tokens_per_block
        entries = {slot: entry for entry, slot in enumerate(batch.slots.tolist())}
        parents = np.array([entries[slot] for slot in added.slots], np.int32)
        positions = np.add(added.num_tokens, added.places, dtype=np.int32)
        num_computed = batch.positions[batch.cu_rows[parents]].tolist()
        copies = []
        for branch, (slot, position, computed) in enumerate(
            zip(added.slots, positions.tolist(), num_computed, strict=True)
        ):
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
            token_ids=np.concatenate([batch.token_ids, np.array(added.token_ids, np.int32)]),
            positions=np.concatenate([batch.positions, positions]),
            logit_rows=np.concatenate([batch.logit_rows, new_rows]),
            branch_parents=parents,
        )
