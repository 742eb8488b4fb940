"""Logit edits while drafting: the lists and token histories of one call's requests, kept up to date on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.table import PackedSampling
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import Int32Array

if TYPE_CHECKING:
    from torch import Tensor


class DraftEdits:
    """What penalties, bias, bad words and min_tokens of a draft call read. Most calls need none of it, so memory grows
    when one does, and what reads it is not captured in graphs."""

    def __init__(self, runtime: Runtime, max_batch_size: int, vocab_size: int) -> None:
        self._runtime = runtime
        self._max_batch_size = max_batch_size
        self._vocab_size = vocab_size
        self._packed = PackedSampling(max_batch_size, vocab_size)
        self._staging = Staging(runtime, 4)
        self._logits: Tensor | None = None

    def upload(
        self, sampling: npt.NDArray[np.void], slots: Int32Array, known: Int32Array, wanted: Int32Array
    ) -> npt.NDArray[np.void]:
        """Send the lists of the slots [n] and their `known` tokens [n], with room for `wanted` [n] more.

        -> their entries [n] with device addresses; valid until the next call.
        """
        size = self._packed.gather(sampling, slots, known, wanted)
        if size > self._staging.size:
            self._runtime.wait()
            self._staging = Staging(self._runtime, 2 * size)
        self._packed.place(self._staging.fill()[:size], self._staging.device.data_ptr(), None)
        entries: npt.NDArray[np.void] = self._packed.entries
        self._staging.send(size)
        return entries

    def scratch(self) -> Tensor:
        """fp32 [max_batch_size, vocab_size]: for the edited logits."""
        import torch

        if self._logits is None:
            shape = (self._max_batch_size, self._vocab_size)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=self._runtime.device)
        return self._logits
