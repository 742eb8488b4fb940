"""The drafter without a model: it proposes what followed the longest earlier occurrence of the text's suffix, in the
request's prompt and output and in its client's prediction (a generalized prompt lookup; ops/suffix.py)."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.counts import DRAFTERS, Int32Array
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.core.request import Request
from faser_trtllm.drafters.base import DrafterSpec, nothing_drafted
from faser_trtllm.ops.suffix import SuffixAutomata
from faser_trtllm.sampling.table import SamplingTable

MAX_TOKENS = 32_768  # latest tokens of a request that are searched; about 150 bytes each


class SuffixDrafter:
    """Drafts without a draft model's step, and before the draft model. Where the draft model would draft too, a match
    must be at least as likely to be accepted as that model's drafts have been for the request."""

    def __init__(
        self,
        sampling: SamplingTable,
        max_seq_len: int,
        *,
        has_model: bool,
        resources: ExitStack,
        only_predictions: bool = False,
    ) -> None:
        """has_model: a draft model drafts after it. resources: will free the automata. only_predictions: draft from
        predictions only, whatever a request asks for."""
        self._sampling = sampling
        sources = 1 << native.BY_PREDICTION | (0 if only_predictions else 1 << native.BY_SUFFIX)
        self.spec = DrafterSpec("suffix", has_kv=False, asked_by=sources)
        self._predicted: set[int] = set()  # slots whose prediction is in the automaton
        self._automata = resources.enter_context(SuffixAutomata(len(sampling.array), min(max_seq_len, MAX_TOKENS)))
        self._has_model = has_model

    def propose(self, plan: SchedulerOutput, num_pending: Int32Array) -> DraftResult:
        """See Drafter.propose; a request with a guide gets only drafts that its guide allows."""
        rows = plan.scheduled
        drafters = rows.counts[DRAFTERS]
        may_draft = (drafters & self.spec.bits > 0) & (rows.num_computed == rows.num_tokens - 1)
        num_new = np.maximum(rows.num_drafts - num_pending, 0) * may_draft
        if not any(num_new.tolist()):
            return nothing_drafted(plan)
        for index in np.flatnonzero(drafters & 1 << native.BY_PREDICTION).tolist():
            self._take_prediction(rows.requests[index])
        num_model = rows.max_model_drafts * (drafters >> native.BY_MODEL & 1 if self._has_model else 0)
        found = self._automata.draft(self._sampling.array, rows.slots, rows.num_tokens, num_pending, num_new, num_model)
        guided = self._sampling.guided
        if guided.slots:  # checks pending drafts too, since a GPU draws its drafts without masks
            for index, (slot, count) in enumerate(zip(rows.slots.tolist(), found.tolist(), strict=True)):
                if count and slot in guided.slots:
                    known, pending = int(rows.num_tokens[index]), int(num_pending[index])
                    found[index] = max(0, guided.num_allowed(slot, known, pending + count) - pending)
        return DraftResult(found, rows.num_draft_computed, num_free=found)

    def end(self, slot: int) -> None:
        self._predicted.discard(slot)
        self._automata.reset(slot)

    def _take_prediction(self, request: Request) -> None:
        if request.slot not in self._predicted:
            self._predicted.add(request.slot)
            is_all = not request.counts[DRAFTERS] & self.spec.bits & 1 << native.BY_SUFFIX
            self._automata.predict(request.slot, request.params.prediction, only_prediction=is_all)
