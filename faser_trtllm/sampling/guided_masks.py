"""Token masks: the tokens that a guide allows at each drafted or verified position, and those that a request allows at
every position."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.guide import Guide, GuideError, GuideState
from faser_trtllm.core.request import Request
from faser_trtllm.native.structures import FillMasks

log = logging.getLogger(__name__)

UInt32Array = npt.NDArray[np.uint32]


class GuidedMasks:
    """Mask memory and grammar state per slot; slots without a guide cost nothing.

    A mask depends on the output tokens before its position, pending drafts included, so draft and target use the same
    one. It is written once: while drafting, or before rejection sampling for the row after the last draft. A GPU engine
    drafts without masks, so all are written before rejection sampling, up to the first draft that its mask forbids:
    that draft is rejected, and no row after it is used. Dropped drafts are detected by comparing tokens, so rejections,
    drafts that stay pending and preemption need no extra calls. Any thread may call, but only one at a time per slot.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, max_draft_len: int, clock: Clock) -> None:
        self._clock = clock
        self._num_words = -(-vocab_size // 32)
        self._num_rows = max_draft_len + 1  # positions of the pending drafts and the next one
        self._slots: list[_GuidedSlot | None] = [None] * max_batch_size
        self.slots: set[int] = set()  # slots whose requests have a guide
        self._memory: list[UInt32Array | None] = [None] * max_batch_size
        self._allowed: list[UInt32Array | None] = [None] * max_batch_size  # of slots without a guide
        self._swallowed: BaseException | None = None
        self._callback = FillMasks(self._fill_masks)
        self._callback_address = native.address_of_function(self._callback)

    def bind(self, slot: int, request: Request) -> dict[str, Any]:
        """Start the request's guide; return the slot's mask fields of faser_sampling, {} if all tokens are allowed."""
        guide, allowed = request.params.guide, self._mask_of(request.params.allowed_token_ids)
        if guide is None:
            self._allowed[slot] = allowed
            return {} if allowed is None else {"masks": allowed.ctypes.data, "num_mask_rows": 1}
        masks = self._memory[slot]
        if masks is None:
            masks = np.zeros((self._num_rows, self._num_words), np.uint32)
            self._memory[slot] = masks
        self._slots[slot] = _GuidedSlot(request, guide, masks, allowed)
        self.slots.add(slot)
        return {"masks": masks.ctypes.data, "num_mask_rows": self._num_rows, "fill_masks": self._callback_address}

    def release(self, slot: int) -> None:
        """Drop the slot's guide; its memory is kept for the next one."""
        self._slots[slot] = self._allowed[slot] = None
        self.slots.discard(slot)

    def prepare(self, slot: int, position: int, num_rows: int) -> None:
        """Write the masks of num_rows positions from `position` on, if the slot has a guide.

        Re-raises exceptions from drafting, such as KeyboardInterrupt, which native code cannot propagate.
        """
        if self._swallowed is not None:
            error, self._swallowed = self._swallowed, None
            raise error
        guided = self._slots[slot]
        if guided is not None:
            begun_s = self._clock.now_s()
            guided.num_masks += guided.prepare(position, num_rows)
            guided.ms += 1e3 * (self._clock.now_s() - begun_s)

    def take_costs(self) -> dict[int, tuple[float, int]]:
        """Return, by slot, the ms and the number of masks since the last call. No other thread may call any method
        meanwhile."""
        costs = {}
        for slot in self.slots:
            guided = self._slots[slot]
            if guided is not None and guided.num_masks:
                costs[slot] = guided.ms, guided.num_masks
                guided.ms, guided.num_masks = 0.0, 0
        return costs

    def num_allowed(self, slot: int, position: int, num_drafts: int) -> int:
        """Return how many of the slot's drafts from this position on come before the first that its guide forbids. For
        drafts that were drawn without masks; writes no mask after that of the first forbidden draft."""
        guided = self._slots[slot]
        for i in range(num_drafts if guided is not None else 0):
            self.prepare(slot, position + i, 1)
            if guided is not None and not guided._allows(position + i):
                return i
        return num_drafts

    def is_complete(self, slot: int, position: int) -> bool:
        """Return True if the guide lets the slot's output end before this position; False without a guide."""
        guided = self._slots[slot]
        return guided is not None and guided.is_complete(position)

    def error(self, slot: int, position: int) -> str:
        """Return why the mask of this position could not be computed, in which case it allows nothing, or ""."""
        guided = self._slots[slot]
        return "" if guided is None else guided.error(position)

    def _mask_of(self, token_ids: Sequence[int] | None) -> UInt32Array | None:
        if token_ids is None:
            return None
        bits = np.zeros(32 * self._num_words, bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _fill_masks(self, num_requests: int, slots: Any, num_known: Any) -> None:
        try:
            for i in range(num_requests):
                self.prepare(slots[i], num_known[i], 1)
        except BaseException as error:
            self._swallowed = error


class _GuidedSlot:
    """One request's state and masks. The state sees output tokens up to but not including an end id."""

    def __init__(self, request: Request, guide: Guide, masks: UInt32Array, allowed: UInt32Array | None) -> None:
        """masks [num_rows, words]: to write to. allowed: a mask of the tokens that the request allows; None: all."""
        self._request = request
        self._guide = guide
        self._masks = masks
        self._allowed = allowed
        self._end_ids = frozenset(request.params.end_ids)
        self._positions = [-1] * len(masks)  # of the mask in each row of memory; -1: none
        self._errors: dict[int, str] = {}  # by position; a mask that could not be computed allows nothing
        self._state: GuideState = guide.start(request.params.end_ids)
        self._seen: list[int] = []  # output tokens that the state has consumed
        self.ms, self.num_masks = 0.0, 0  # time and number of masks since the last take_costs()
        self._num_committed = 0  # leading tokens of _seen that can no longer be rolled back

    def prepare(self, position: int, num_rows: int) -> int:
        """Write the masks that were not written yet and return their number."""
        num_written = 0
        self._sync(position + num_rows - 1)
        for p in range(position, position + num_rows):
            if p > position and not self._allows(p - 1):
                break
            row = p % len(self._masks)
            if self._positions[row] != p:
                num_written += 1
                self._positions[row] = p if self._write(p, self._masks[row]) else -1
        self._num_committed = min(self._request.num_output_tokens, len(self._seen))
        return num_written

    def _allows(self, position: int) -> bool:
        """Return True if the position's mask allows its token; the mask must be written."""
        token = int(self._request.tokens[position])
        return bool(self._masks[position % len(self._masks), token // 32] >> np.uint32(token % 32) & 1)

    def is_complete(self, position: int) -> bool:
        try:
            self._sync(position)
            return self._move_to(position) and self._state.is_complete
        except GuideError:
            return False

    def error(self, position: int) -> str:
        return self._errors.get(position, "")

    def _sync(self, position: int) -> None:
        """Roll back the state to before the first token that the request no longer has."""
        output = self._output(self._num_committed, position)
        seen = self._seen[self._num_committed :]
        for i, (token, wanted) in enumerate(zip(seen, output, strict=False)):
            if token != wanted:
                self._take_back(self._num_committed + i)
                return

    def _write(self, position: int, mask: UInt32Array) -> bool:
        """Write a mask; return False if it must not be kept: after an end id, which the state never sees, it is empty.

        A failure affects only this position, and the state starts over: the output may never reach that position.
        """
        try:
            if not self._move_to(position):
                mask[:] = 0
                return False
            self._state.fill(mask)
            if self._allowed is not None:
                mask &= self._allowed
        except BaseException as error:  # a panic in the library is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            mask[:] = 0
            message = str(error)
            if not isinstance(error, GuideError):
                log.exception("a guide failed")
                message = f"the guide of this request failed with {type(error).__name__}; see the server's log"
            self._errors[position] = message
            with contextlib.suppress(GuideError):  # if this fails too, the next mask reports it
                self._state = self._guide.start(self._request.params.end_ids)
                self._state.advance(self._seen)
        return True

    def _move_to(self, position: int) -> bool:
        """Advance the state to the output tokens before the position; return False if an end id is among them."""
        length = position - self._request.prompt_len
        if len(self._seen) > length:
            self._take_back(length)
        new = self._output(len(self._seen), position)
        end = next((i for i, token in enumerate(new) if token in self._end_ids), None)
        if new[:end]:
            self._state.advance(new[:end])
            self._seen += new[:end]
        return end is None

    def _output(self, first: int, position: int) -> list[int]:
        """Return the output tokens from index `first` on that are before the position."""
        request = self._request
        tokens: list[int] = request.tokens[request.prompt_len + first : position].tolist()
        return tokens

    def _take_back(self, length: int) -> None:
        self._state.rollback(len(self._seen) - length)
        del self._seen[length:]
        last = self._request.prompt_len + length
        self._positions = [p if p <= last else -1 for p in self._positions]
        self._errors = {p: message for p, message in self._errors.items() if p <= last}
