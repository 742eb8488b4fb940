"""Engines without models, which replay recorded outputs."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.replay.recording import Recording
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.ops.arrays import int32_at
from faser_trtllm.ops.prune_rows import HostPruning
from lab.reference.draft_stop import next_worth

if TYPE_CHECKING:
    from typing_extensions import Self

VOCAB_SIZE = 16
RIGHT, WRONG = 1, 2  # every text repeats RIGHT, so a draft is only right or wrong
SURE = 1e3  # a logit that no noise of a seeded request reaches
NUM_ID_TOKENS = 4


def prompt_of(text: int, prompt_len: int) -> list[int]:
    """Return a prompt whose first tokens encode the number of its text."""
    digits = [text // VOCAB_SIZE**i % VOCAB_SIZE for i in range(NUM_ID_TOKENS)]
    return digits + [RIGHT] * (prompt_len - NUM_ID_TOKENS)


class Replayed(HostPruning):
    """An engine of one segment, without passes."""

    distinct_experts = 0.0  # it has no experts

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32]:
        return self.forward(batch)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        raise NotImplementedError("a replayed draft has no logits")

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        raise NotImplementedError("a replayed engine has one segment")

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        raise NotImplementedError("a replayed engine has one segment")

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        raise NotImplementedError("a replayed target drafts nothing")

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ReplayedTarget(Replayed):
    """A target that outputs RIGHT everywhere."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._logits = np.zeros((spec.max_num_tokens, VOCAB_SIZE), np.float32)
        self._logits[:, RIGHT] = SURE

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        return self._logits[: batch.logit_rows.size]


class ReplayedDraft(Replayed):
    """A draft that replays the recording, with its margins and the stop rule of ops/draft_stop.py."""

    def __init__(self, spec: EngineSpec, recording: Recording) -> None:
        super().__init__(spec)
        self._recording = recording
        self._text = np.zeros(spec.max_batch_size, np.int64)  # by slot
        k = recording.max_draft_len
        places = np.arange(k)
        self._tokens = [np.where(places == right, WRONG, RIGHT).astype(np.int32) for right in range(k + 1)]

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        batch, sampling = draft_batch.batch, draft_batch.sampling
        slots, wanted = batch.slots, draft_batch.num_new_drafts
        for slot in slots[batch.positions[batch.cu_rows[:-1]] == 0].tolist():
            digits = int32_at(int(sampling["tokens"][slot]), NUM_ID_TOKENS)
            self._text[slot] = digits @ VOCAB_SIZE ** np.arange(NUM_ID_TOKENS)
        pending, known = draft_batch.num_drafts, draft_batch.num_tokens
        text, place = self._text[slots], known - sampling["prompt_len"][slots]
        place = np.where(wanted > 0, place, 0)
        margins = self._recording.margins[text, place]
        drafted = self.num_drafts(draft_batch.stop, sampling["mode"][slots], margins, pending, wanted)
        num_right = self._recording.num_right[text, place]
        to_tokens, to_margins = sampling["tokens"][slots], sampling["draft_margins"][slots]
        for i in np.flatnonzero(drafted).tolist():
            first, size, at = int(pending[i]), 4 * int(drafted[i]), 4 * int(known[i] + pending[i])
            chain = self._tokens[num_right[i]]
            ctypes.memmove(int(to_tokens[i]) + at, chain.ctypes.data + 4 * first, size)
            ctypes.memmove(int(to_margins[i]) + at, margins[i, first:].ctypes.data, size)
        return drafted

    @staticmethod
    def num_drafts(
        stop: DraftStop | None,
        mode: npt.NDArray[np.int32],
        margins: npt.NDArray[np.float32],
        pending: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """Return drafts per request by the rule; all arguments are per request."""
        if stop is None:
            unbounded: npt.NDArray[np.int32] = wanted.copy()
            return unbounded
        n, k = margins.shape
        logits = stop.slope[mode, :k].astype(np.float64) * margins + stop.intercept[mode, :k]
        survival = np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=1)
        drafted = np.zeros(n, np.int32)
        active = np.flatnonzero(wanted > 0)
        while active.size:
            drafted[active] += 1
            active = active[drafted[active] < wanted[active]]
            place = pending[active] + drafted[active]
            worth = next_worth(stop, mode[active], place, survival[active, place - 1])
            active, worth = active[worth >= 0.0], worth[worth >= 0.0]
            if worth.sum() < stop.step_price[active.size]:
                break
        return drafted
