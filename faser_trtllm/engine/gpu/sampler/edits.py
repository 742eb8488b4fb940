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
        import torch

        self._runtime = runtime
        self._max_batch_size = max_batch_size
        self._vocab_size = vocab_size
        self._packed = PackedSampling(max_batch_size, vocab_size)
        self._staging = Staging(runtime, 4)
        self._starts: Tensor = torch.zeros(0, dtype=torch.int64, device=runtime.device)
        self._logits: Tensor | None = None

    def upload(
        self, sampling: npt.NDArray[np.void], slots: Int32Array, known: Int32Array, wanted: Int32Array
    ) -> npt.NDArray[np.void]:
        """Send the lists of the slots [n] and their `known` tokens [n], with room for `wanted` [n] more.

        -> their entries [n] with device addresses; valid until the next call.
        """
        import torch

        size = self._packed.gather(sampling, slots, known, wanted)
        starts_at = -(-size // 2) * 2
        needed = starts_at + 2 * self._max_batch_size + 1  # and one number for tokens that are not kept
        if needed > self._staging.size:
            self._runtime.wait()
            self._staging = Staging(self._runtime, 2 * needed)
        filled, base = self._staging.fill(), self._staging.device.data_ptr()
        self._packed.place(filled[:size], base, None)
        entries: npt.NDArray[np.void] = self._packed.entries
        starts = filled[starts_at : needed - 1].view(np.int64)
        starts[: slots.size] = (entries["tokens"].astype(np.int64) - base) // 4
        starts[slots.size :] = 0
        self._staging.send(needed)
        self._starts = self._staging.device[starts_at : needed - 1].view(torch.int64)
        self._unused = needed - 1
        return entries

    def logits(self, logits: Tensor) -> Tensor:
        """A copy of logits [n, vocab_size] for the kernel to edit."""
        import torch

        if self._logits is None:
            shape = (self._max_batch_size, self._vocab_size)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=self._runtime.device)
        edited = self._logits[: logits.shape[0]]
        edited.copy_(logits)
        return edited

    def append(self, token: Tensor, position: Tensor, is_new: Tensor) -> None:
        """Write the tokens [n] of the requests where is_new [n] to their positions [n]."""
        import torch

        place = torch.where(is_new, self._starts[: token.shape[0]] + position, self._unused)
        self._staging.device.index_put_((place,), token)
