"""Logit edits while drafting: the lists and token histories of one call's requests, kept up to date on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.sampler.call import DraftCall
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import Int32Array
from faser_trtllm.ops.transfer.pack_sampling import ENTRY_INTS, SamplingPacker

if TYPE_CHECKING:
    from torch import Tensor


class DraftEdits:
    """What penalties, bias, bad words and min_tokens of a draft call read. Most calls need none of it, so memory grows
    when one does, and what reads it is not captured in graphs."""

    def __init__(self, runtime: Runtime, max_batch_size: int, vocab_size: int) -> None:
        self._runtime = runtime
        self._max_batch_size = max_batch_size
        self._vocab_size = vocab_size
        self._packer = SamplingPacker(vocab_size)
        self._staging = Staging(runtime, 4)
        self._logits: Tensor | None = None

    def upload(self, call: DraftCall) -> Int32Array:
        """Send the lists of the call's requests [n] and their known tokens, with room for those that they want.

        -> their entries [n * ENTRY_INTS] with device addresses; valid until the next call.
        """
        while True:
            filled, base = self._staging.fill(), self._staging.device.data_ptr()
            size, _ = self._packer.pack(call.sampling, call.slots, call.known, call.wanted, filled, base)
            if size <= self._staging.size:
                break
            self._runtime.wait()
            self._staging = Staging(self._runtime, 2 * size)
        self._staging.send(size)
        return filled[: call.slots.size * ENTRY_INTS]

    def scratch(self) -> Tensor:
        """fp32 [max_batch_size, vocab_size]: for the edited logits."""
        import torch

        if self._logits is None:
            shape = (self._max_batch_size, self._vocab_size)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=self._runtime.device)
        return self._logits
