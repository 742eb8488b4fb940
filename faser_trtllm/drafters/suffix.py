"""The drafter that has no model: what followed, in the request's own prompt and output, the longest suffix that
occurred before (prompt lookup and more; ops/suffix.py)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import DrafterSpec, nothing_drafted
from faser_trtllm.drafters.model import ModelDrafter
from faser_trtllm.ops.suffix import SuffixAutomata
from faser_trtllm.sampling.table import SamplingTable

MODEL = ModelDrafter.spec.name
MAX_TOKENS = 32_768  # of a request's text that are searched, its latest; about 150 bytes each


class SuffixDrafter:
    """Costs no step of a draft model, so where the match is at least as sure as the draft model has been for the
    request, it goes first."""

    spec = DrafterSpec("suffix", native.BY_SUFFIX, has_kv=False)

    def __init__(self, sampling: SamplingTable, max_seq_len: int, *, has_model: bool, resources: ExitStack) -> None:
        """has_model: the draft model drafts behind it. resources: free the automata."""
        n = len(sampling.array)
        self._sampling = sampling
        self._automata = resources.enter_context(SuffixAutomata(n, min(max_seq_len, MAX_TOKENS)))
        self._has_model = has_model
        self._columns = np.zeros((5, n), np.int32)  # of faser_suffix_draft, from slots on
        self._views = [column.data for column in self._columns]

    @property
    def memory_bytes(self) -> int:
        """Of the texts, now."""
        return self._automata.memory_bytes

    def propose(self, plan: SchedulerOutput, taken: Sequence[int]) -> DraftResult:
        """As Drafter.propose; a request with a guide gets what its guide allows."""
        rows, lengths, has_model = plan.scheduled, plan.model_lengths, self._has_model
        asked: list[int] = []
        entries: list[int] = []  # faser_suffix_draft's columns, request by request
        columns = rows.slots, rows.num_tokens, rows.num_computed, rows.num_pending, rows.num_drafts
        for index, (request, slot, known, computed, pending, wanted) in enumerate(
            zip(rows.requests, *columns, strict=True)
        ):
            if taken:
                pending += taken[index]
            if wanted <= pending or computed != known - 1 or not request.may_draft(self.spec.name):
                continue
            num_model = 0
            if has_model and request.may_draft(MODEL):
                num_model = wanted if lengths is None else lengths.get(slot, 0)
            asked.append(index)
            entries += (slot, known, pending, wanted - pending, num_model)
        if not asked:
            return nothing_drafted(plan)
        for view, place in zip(self._views, range(5), strict=True):
            view[: len(asked)] = array("i", entries[place::5])
        found = self._automata.draft(self._sampling.array, *self._columns[:, : len(asked)]).tolist()
        if self._sampling.guided.slots:
            found = self._allowed(entries, found)
        drafted = [0] * len(rows)
        for index, count in zip(asked, found, strict=True):
            drafted[index] = count
        return DraftResult(drafted, rows.num_draft_computed, num_free=drafted)

    def _allowed(self, entries: Sequence[int], found: Sequence[int]) -> list[int]:
        """How many of the drafts guides allow; of the pending ones, too, since a GPU draws its drafts without masks."""
        guided, allowed = self._sampling.guided, []
        for slot, known, pending, count in zip(entries[::5], entries[1::5], entries[2::5], found, strict=True):
            if count and slot in guided.slots:
                count = max(0, guided.num_allowed(slot, known, pending + count) - pending)
            allowed.append(count)
        return allowed

    def end(self, slot: int) -> None:
        self._automata.reset(slot)
