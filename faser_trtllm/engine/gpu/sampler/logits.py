"""Logits that stay on the device for sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


class LogitsSource(Protocol):
    def host_logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Return the first num_rows logits of the last pass on the host."""


class DeviceLogits:
    """Logits [num_rows, vocab_size] fp32 of an engine's last pass; valid until its next call.

    tensor: on the device. source: the engine; None if tensor is a copy. Indexing copies all rows to the host and waits.
    """

    def __init__(self, tensor: Tensor, source: LogitsSource | None = None) -> None:
        self.tensor = tensor
        self._source = source

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Any) -> Any:
        if self._source is None:
            return self.tensor.cpu().numpy()[index]
        return self._source.host_logits(self.shape[0])[index]
