"""What each slot samples with: the memory that the native sampling functions read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.request import Request
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, Float32Array, SamplingArray, address_of
from faser_trtllm.sampling.guided_masks import GuidedMasks


def random_key() -> int:
    """64 random bits of the operating system."""
    return int.from_bytes(os.urandom(8), "little")


class SamplingTable:
    """One faser_sampling per slot. `array` [max_batch_size] (SAMPLING_DTYPE) keeps its address for life.

    A slot is bound when its request is admitted and released when the request leaves it. Memory for the
    drafts' laws (max_draft_len x vocab_size fp32) is allocated when a slot first needs it, and then stays
    with the slot. new_key: the source of keys for requests without a seed; a key is drawn at each bind, so
    that no random number is used twice when a request comes back after preemption. `guided`: masks of the slots whose
    requests have a guide.
    """

    def __init__(
        self,
        max_batch_size: int,
        vocab_size: int,
        max_draft_len: int,
        *,
        new_key: Callable[[], int] = random_key,
    ) -> None:
        self.array: SamplingArray = np.zeros(max_batch_size, SAMPLING_DTYPE)
        self.guided = GuidedMasks(max_batch_size, vocab_size, max_draft_len)
        self._vocab_size = vocab_size
        self._max_draft_len = max_draft_len
        self._new_key = new_key
        self._draft_probs: list[Float32Array | None] = [None] * max_batch_size
        self._kept: list[tuple[npt.NDArray[Any], ...]] = [()] * max_batch_size

    def bind(self, slot: int, request: Request) -> None:
        """Let the slot sample as the request asks. The request's arrays must stay the same arrays."""
        params = request.params
        mode = request.sampling_mode
        kept: list[npt.NDArray[Any]] = [request.tokens, request.draft_margins, request.draft_candidates]
        entry: dict[str, Any] = {
            "tokens": address_of(request.tokens, np.int32),
            "draft_margins": address_of(request.draft_margins, np.float32),
            "prompt_len": request.prompt_len,
            "min_tokens": params.min_tokens,
            "mode": mode,
            "top_k": params.top_k or 0,
            "temperature": params.effective_temperature,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "min_p": params.min_p or 0.0,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "num_end_ids": len(params.end_ids),
            "num_bias": len(params.logit_bias),
            "num_bad_words": len(params.bad_words),
        }
        if request.draft_candidates.size:
            entry["draft_candidates"] = address_of(request.draft_candidates, np.int32)
        if params.end_ids:
            entry["end_ids"] = _keep(kept, params.end_ids, np.int32)
        if params.logit_bias:
            entry["bias_ids"] = _keep(kept, [token for token, _ in params.logit_bias], np.int32)
            entry["bias_values"] = _keep(kept, [value for _, value in params.logit_bias], np.float32)
        if params.bad_words:
            entry["bad_words"] = _keep(kept, [token for word in params.bad_words for token in word], np.int32)
            entry["cu_bad_words"] = _keep(kept, np.cumsum([0, *map(len, params.bad_words)]), np.int32)
        if mode == native.SEEDED:
            entry["key"] = params.seed
        elif mode == native.SAMPLED:
            entry["key"] = self._new_key()
            entry["draft_probs"] = self._draft_probs_address(slot)
        self.release(slot)
        entry |= self.guided.bind(slot, request)
        row = self.array[slot]
        for name, value in entry.items():
            row[name] = value
        self._kept[slot] = tuple(kept)

    def release(self, slot: int) -> None:
        """Forget the slot's request; its memory for drafts' laws stays for the next one."""
        self.array[slot] = np.zeros((), SAMPLING_DTYPE)
        self.guided.release(slot)
        self._kept[slot] = ()

    def is_bound(self, slot: int) -> bool:
        """Whether the slot has a request's entry."""
        return bool(self.array["tokens"][slot])

    def draft_probs(self, slot: int) -> Float32Array:
        """The laws [max_draft_len, vocab_size] that pending drafts were drawn from; [0, vocab_size] if never
        needed.

        The draft at a position has row position % max_draft_len.
        """
        probs = self._draft_probs[slot]
        return np.zeros((0, self._vocab_size), np.float32) if probs is None else probs

    def _draft_probs_address(self, slot: int) -> int:
        if self._max_draft_len == 0:
            return 0
        probs = self._draft_probs[slot]
        if probs is None:
            probs = np.zeros((self._max_draft_len, self._vocab_size), np.float32)
            self._draft_probs[slot] = probs
        return address_of(probs, np.float32)


def _keep(kept: list[npt.NDArray[Any]], values: npt.ArrayLike, dtype: type[np.generic]) -> int:
    """Make an array of the values, keep it alive with the slot, and return its address."""
    array = np.array(values, dtype)
    kept.append(array)
    return address_of(array, dtype)
