"""A target that outputs a given text, such as the answer of a better model, at its own cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from lab.delegating_engine import DelegatingEngine


class ReplayEngine(DelegatingEngine):
    """An engine that replays the text of one request at a time; without one it outputs its own."""

    _text: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def say(self, text: Sequence[int]) -> None:
        """Set the text, prompt first; () for none."""
        self._text = np.array(text, np.int32)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        return self._replayed(batch, self._inner.forward(batch))

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        logits = self._inner.run_segment(batch, segment)
        return None if logits is None else self._replayed(batch, logits)

    def _replayed(self, batch: RaggedBatch, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self._text.size:
            following = batch.positions[batch.logit_rows] + 1
            rows = np.flatnonzero(following < self._text.size)
            logits[rows] = 0.0
            logits[rows, self._text[following[rows]]] = 20.0
        return logits
