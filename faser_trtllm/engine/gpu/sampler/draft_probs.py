"""Device memory for the distributions that pending unseeded drafts were drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.ops.transfer.pack_sampling import DraftProbsAddress
from faser_trtllm.partition.green_context import GpuPartition

if TYPE_CHECKING:
    from torch import Tensor


class DeviceDraftProbs:
    """DraftProbs (sampling/draft_probs.py) that the draft engine writes and the rejection sampler reads.

    tensor: fp32 [max_batch_size, max_draft_len, vocab_size]. device_address: its address, for sampling entries.
    """

    def __init__(
        self, runtime: Runtime, partition: GpuPartition, max_batch_size: int, max_draft_len: int, vocab_size: int
    ) -> None:
        """partition: where copies run; they block until they are done."""
        import torch

        self._runtime = runtime
        self._partition = partition
        shape = (max_batch_size, max_draft_len, vocab_size)
        self.tensor = torch.zeros(shape, dtype=torch.float32, device=runtime.device)
        size = self.tensor.stride(0) * self.tensor.element_size()
        self.device_address = DraftProbsAddress(self.tensor.data_ptr(), size)

    def address(self, slot: int) -> int:
        return 0

    def rows(self, slot: int) -> Tensor:
        return self.tensor[slot]

    def park(self, slot: int) -> Tensor:
        import torch

        with self._runtime.on(self._partition), torch.no_grad():
            parked = self.tensor[slot].clone()
            self._runtime.wait()
        return parked

    def restore(self, slot: int, parked: Tensor) -> None:
        import torch

        with self._runtime.on(self._partition), torch.no_grad():
            self.tensor[slot].copy_(parked)
            self._runtime.wait()
