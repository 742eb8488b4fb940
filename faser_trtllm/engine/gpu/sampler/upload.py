"""Upload a batch's sampling entries to the device, along with the lists that they point to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.gpu.staging import Staging
from faser_trtllm.ops.arrays import Int32Array, SamplingArray
from faser_trtllm.ops.transfer.pack_sampling import ENTRY_INTS, SamplingPacker

if TYPE_CHECKING:
    from torch import Tensor


class Uploaded(NamedTuple):
    """Uploaded entries, valid until the next upload."""

    entries: Int32Array  # int32 [n * ENTRY_INTS], as sent
    on_device: Tensor  # the entries on the device
    columns: list[Tensor]  # the given columns on the device
    is_edited: bool  # True if some request edits its logits


class EntryUpload:
    """Sends entries and lists in one copy; its memory grows when a batch needs more."""

    def __init__(self, runtime: Runtime, vocab_size: int, size: int) -> None:
        """size: initial capacity, in int32 numbers."""
        self._runtime = runtime
        self._packer = SamplingPacker(vocab_size)
        self._staging = Staging(runtime, size)

    def send(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        *columns: Int32Array,
        **options: Any,
    ) -> Uploaded:
        """Send the slots' entries [n] and then the columns. options: keyword arguments of SamplingPacker.pack."""
        while True:
            filled, device = self._staging.fill(), self._staging.device
            at = device.data_ptr()
            size, is_edited = self._packer.pack(sampling, slots, num_tokens, num_drafts, filled, at, **options)
            end = -(-size // 4) * 4
            needed = end + sum(column.size for column in columns)
            if needed <= self._staging.size:
                break
            self._runtime.wait()
            self._staging = Staging(self._runtime, max(needed, 2 * self._staging.size))
        sections = []
        for column in columns:
            filled[end : end + column.size] = column
            sections.append(device[end : end + column.size])
            end += column.size
        self._staging.send(end)
        num_ints = slots.size * ENTRY_INTS
        return Uploaded(filled[:num_ints], device[:num_ints], sections, is_edited)
