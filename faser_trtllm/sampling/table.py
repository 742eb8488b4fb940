"""The sampling parameters of each slot, in the memory that native sampling functions read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.clock import Clock, MonotonicClock
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingFields, SamplingParams
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, SamplingArray, address_of
from faser_trtllm.ops.probs import NO_FILTERS
from faser_trtllm.sampling.draft_probs import DraftProbs, HostDraftProbs
from faser_trtllm.sampling.guided_masks import GuidedMasks

_PLAIN_FIELDS = [field.name for field in fields(SamplingFields) if field.name in (SAMPLING_DTYPE.names or ())]


def random_key() -> int:
    """Return 64 random bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little")


class _TokenLists:
    """A request's logit bias and bad words as arrays, by their fields of SAMPLING_DTYPE."""

    def __init__(self, params: SamplingParams) -> None:
        self._bias, self._words = bias, words = params.logit_bias, params.bad_words
        self.arrays: dict[str, npt.NDArray[Any]] = {
            "bias_ids": np.array([token for token, _ in bias], np.int32),
            "bias_values": np.array([value for _, value in bias], np.float32),
            "bad_words": np.array([token for word in words for token in word], np.int32),
            "cu_bad_words": np.cumsum([0, *map(len, words)] if words else [], dtype=np.int32),
        }

    def are_of(self, params: SamplingParams) -> bool:
        return self._bias is params.logit_bias and self._words is params.bad_words


class SamplingTable:
    """One faser_sampling per slot, in `array` [max_batch_size] (SAMPLING_DTYPE), which never moves.

    A slot is bound when its request is admitted and released when the request leaves. `guided` has the masks of slots
    whose requests have a guide. new_key: returns a key for a request without a seed. Each bind draws a new one, so no
    random number is reused when a request resumes after preemption. draft_probs: memory for the distributions of
    unseeded drafts; None: host memory. clock: times the writing of masks; None: the system's.
    """

    def __init__(
        self,
        max_batch_size: int,
        vocab_size: int,
        max_draft_len: int,
        *,
        new_key: Callable[[], int] = random_key,
        draft_probs: DraftProbs | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.array: SamplingArray = np.zeros(max_batch_size, SAMPLING_DTYPE)
        self.guided = GuidedMasks(max_batch_size, vocab_size, max_draft_len, clock or MonotonicClock())
        self.draft_probs = draft_probs or HostDraftProbs(max_batch_size, max_draft_len, vocab_size)
        self._new_key = new_key
        self._parked: dict[str, Any] = {}  # draft probs of preempted requests, by request id
        self._kept: list[tuple[npt.NDArray[Any], ...]] = [()] * max_batch_size
        self._lists = _TokenLists(SamplingParams())  # of the latest request; its siblings come next and share them

    def bind(self, slot: int, request: Request) -> None:
        """Set up the slot for the request, whose arrays must not be replaced while it is bound."""
        params = request.params
        mode = request.sampling_mode
        if not self._lists.are_of(params):
            self._lists = _TokenLists(params)
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": request.tokens,
            "draft_margins": request.draft_margins,
            "draft_sources": request.draft_sources,
            "draft_candidates": request.draft_candidates,
            "draft_runners_up": request.draft_runners_up,
            "end_ids": np.array(params.end_ids, np.int32),
            **self._lists.arrays,
        }
        entry: dict[str, Any] = NO_FILTERS | {
            name: value for name in _PLAIN_FIELDS if (value := getattr(params, name)) is not None
        }
        entry |= {name: address_of(array, array.dtype) for name, array in arrays.items() if array.size}
        entry |= {
            "prompt_len": request.prompt_len,
            "mode": mode,
            "temperature": params.effective_temperature,
            "num_end_ids": len(params.end_ids),
            "num_bias": len(params.logit_bias),
            "num_bad_words": len(params.bad_words),
        }
        if mode == native.SEEDED:
            entry["key"] = params.seed
        elif mode == native.SAMPLED:
            entry["key"] = self._new_key()
            if request.request_id in self._parked:
                self.draft_probs.restore(slot, self._parked.pop(request.request_id))
            entry["draft_probs"] = self.draft_probs.address(slot)
        self.release(slot)
        entry |= self.guided.bind(slot, request)
        row = self.array[slot]
        for name, value in entry.items():
            row[name] = value
        self._kept[slot] = tuple(arrays.values())

    def park(self, slot: int, request: Request) -> None:
        """Keep the draft probs of a preempted request until it is bound again or forgotten."""
        if request.sampling_mode == native.SAMPLED:
            self._parked[request.request_id] = self.draft_probs.park(slot)

    def forget(self, request: Request) -> None:
        """Drop the draft probs kept for a preempted request that does not come back."""
        self._parked.pop(request.request_id, None)

    def release(self, slot: int) -> None:
        """Drop the slot's request; its draft_probs memory is kept for the next one."""
        empty = np.zeros((), SAMPLING_DTYPE)
        for name in ("num_tested", "num_passed"):  # counted per slot, not per request
            empty[name] = self.array[slot][name]
        self.array[slot] = empty
        self.guided.release(slot)
        self._kept[slot] = ()

    def is_bound(self, slot: int) -> bool:
        """Return True if the slot is bound to a request."""
        return bool(self.array["tokens"][slot])

    def tests(self, source: int) -> tuple[int, int]:
        """Return how many drafts of a source (native.BY_MODEL, native.BY_SUFFIX) were verified since the start, and how
        many of them were accepted."""
        return int(self.array["num_tested"][:, source].sum()), int(self.array["num_passed"][:, source].sum())
