"""Weights of a draft head in torch's own format (pytorch_model.bin, medusa_lm_head.pt), as many are published.

Only tensors are unpickled. Needs torch; decoders are read from safetensors and GGUF, which need none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.weights import Bfloat16Array, CheckpointWeights, Dtype, Weights, check_shapes, converted

TORCH_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "int32": "I32", "bool": "BOOL"}


class TorchFileWeights(Weights):
    """CheckpointWeights' counterpart for one file."""

    def __init__(self, directory: Path, file: str) -> None:
        """CheckpointError if it cannot be read, or torch is not there."""
        try:
            import torch
        except ImportError as error:
            raise CheckpointError(
                f"{file} in {directory} can only be read with torch; install torch, or convert it to safetensors"
            ) from error
        try:
            loaded = torch.load(directory / file, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{file} in {directory} cannot be read: {reason}; fetch it again") from error
        if not isinstance(loaded, dict) or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
            raise CheckpointError(f"{file} in {directory} holds other things than tensors by name")
        self._file = file
        self._tensors: dict[str, Any] = loaded

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def files(self) -> tuple[str, ...]:
        return (self._file,)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> str:
        name = str(self._tensor(name).dtype).removeprefix("torch.")
        return _TYPES.get(name, name)

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        import torch

        tensor = self._typed(name, ("F32", "F16", "BF16"))
        if tensor.dtype is torch.bfloat16 and dtype is np.uint16:
            bits: Bfloat16Array = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
            return bits
        return converted(tensor.float().numpy(), dtype)

    def integers(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """A tensor of whole numbers, shape checked."""
        check_shapes(self, {name: shape})
        values: npt.NDArray[np.int64] = self._typed(name, ("I32", "I64")).long().numpy()
        return values

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing in {self._file}")
        return self._tensors[name]

    def _typed(self, name: str, types: tuple[str, ...]) -> Any:
        if self.dtype(name) not in types:
            raise CheckpointError(
                f"{self._file}: tensor {name} is of type {self.dtype(name)}, it must be {' or '.join(reversed(types))}"
            )
        return self._tensor(name)


HeadFiles = CheckpointWeights | TorchFileWeights


def open_head_files(directory: Path, stack: ExitStack) -> HeadFiles:
    """The weights of a head's folder: safetensors where there are any; closed with the stack."""
    found = next((file for file in TORCH_FILES if (directory / file).exists()), None)
    if found is None or any(directory.glob("model.safetensors*")):
        return stack.enter_context(CheckpointWeights(directory))
    return TorchFileWeights(directory, found)
