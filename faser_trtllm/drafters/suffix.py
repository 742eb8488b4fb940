"""The drafter that has no model: what followed, in the request's own prompt and output, the longest suffix that
occurred before (prompt lookup and more; ops/suffix.py)."""

from __future__ import annotations

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
        nothing = nothing_drafted(plan)
        slots, num_tokens, num_drafts, num_new, num_model = self._views
        asked: list[int] = []
        has_model, lengths = self._has_model, plan.model_lengths
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            pending = request.num_drafts + (taken[index] if taken else 0)
            limit = scheduled.num_drafts
            if limit <= pending or not request.is_decoding or not request.may_draft(self.spec.name):
                continue
            entry = len(asked)
            slots[entry], num_tokens[entry], num_drafts[entry] = request.slot, request.num_tokens, pending
            num_new[entry] = limit - pending
            if not has_model or not request.may_draft(MODEL):
                num_model[entry] = 0
            else:
                num_model[entry] = limit if lengths is None else lengths.get(request.slot, 0)
            asked.append(index)
        if not asked:
            return nothing
        found = self._automata.draft(self._sampling.array, *self._columns[:, : len(asked)]).tolist()
        drafted = [0] * len(plan.scheduled)
        for entry, (index, count) in enumerate(zip(asked, found, strict=True)):
            request = plan.scheduled[index].request
            if count and request.params.guide is not None:
                # The drafts before them, too: a GPU draws its drafts without masks.
                pending = num_drafts[entry]
                allowed = self._sampling.guided.num_allowed(request.slot, num_tokens[entry], pending + count)
                count = max(0, allowed - pending)
            drafted[index] = count
        return DraftResult(drafted, nothing.num_draft_computed, num_free=drafted)

    def end(self, slot: int) -> None:
        self._automata.reset(slot)
