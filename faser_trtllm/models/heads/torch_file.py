"""Weights of a draft head in torch's own format (pytorch_model.bin, medusa_lm_head.pt). Needs torch.

A file's pickle is checked first, and only tensors are unpickled.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.weights import Bfloat16Array, CheckpointWeights, Dtype, Weights, check_shapes, converted

TORCH_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
MAX_PICKLE_BYTES = 128 << 10  # a tensor takes about 200 bytes
MAX_NAME_CHARS = 256

_CLASSES = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"} | {
    f"torch {kind}Storage"
    for kind in ("BFloat16", "Half", "Float", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
}
_ZIP = b"PK\x03\x04"
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE", "NEWFALSE"}
_CONTAINERS = {"EMPTY_DICT", "EMPTY_TUPLE", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "SETITEM", "SETITEMS"}
_OTHERS = {"PROTO", "BINPERSID", "REDUCE", "BUILD", "STOP"}
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "int32": "I32", "bool": "BOOL"}


class TorchFileWeights(Weights):
    """Weights of one file, with the interface of CheckpointWeights."""

    def __init__(self, directory: Path, file: str) -> None:
        """Load the file; CheckpointError if it cannot be read, or without torch."""
        try:
            import torch
        except ImportError as error:
            raise CheckpointError(
                f"{file} in {directory} can only be read with torch; install torch, or convert it to safetensors"
            ) from error
        where = f"{file} in {directory}"
        try:
            _check_pickle(_pickle_of(directory / file, where), where)
            loaded = torch.load(directory / file, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{where} cannot be read: {reason}; fetch it again") from error
        if not isinstance(loaded, dict) or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
            raise _no_tensors(where)
        for name, tensor in loaded.items():
            if tensor.nbytes > tensor.untyped_storage().nbytes():  # strides of 0
                raise CheckpointError(f"{where}: tensor {name!a:.80} has values that are not stored; save it as a copy")
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
                f"{self._file}: tensor {name} is of type {self.dtype(name)}; it must be {' or '.join(reversed(types))}"
            )
        return self._tensor(name)


def _pickle_of(path: Path, where: str) -> bytes:
    """Return the pickle that torch.load would read; CheckpointError if the file is not torch's zip archive."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:  # torch's own test
            raise CheckpointError(
                f"{where} is no zip archive, as torch.save has written since 1.6; fetch it again, or save it again "
                "with a newer torch or as safetensors"
            )
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        name = infos[0].filename.partition("/")[0] + "/data.pkl" if infos else ""
        pickles = [info for info in infos if info.filename.lower() == name.lower()]  # torch ignores case
        if len(pickles) != 1 or sum(info.file_size for info in infos) > path.stat().st_size:
            raise CheckpointError(f"{where} is no archive of torch.save; fetch it again, or save it as safetensors")
        if pickles[0].file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{where} describes its tensors in {pickles[0].file_size} bytes, allowed are {MAX_PICKLE_BYTES}; save "
                "it as safetensors"
            )
        return archive.read(pickles[0])


def _check_pickle(data: bytes, where: str) -> None:
    """Raise CheckpointError unless a pickle can only hold tensors by name.

    torch refuses other objects, too, but prints them in its message. That may never end, since an object may refer to
    another object a billion times.
    """
    previous, shared = "", set()
    value: Any
    for opcode, value, _ in pickletools.genops(data):
        name = opcode.name
        if name == "GLOBAL":
            if value not in _CLASSES:
                raise CheckpointError(
                    f"{where} holds a {value.replace(' ', '.')!a:.80}, allowed are tensors; save only these, or "
                    "convert it to safetensors"
                )
        elif name == "BINUNICODE":
            if len(value) > MAX_NAME_CHARS or not (value.isascii() and value.isprintable()):
                raise CheckpointError(
                    f"{where} has a name of {len(value)} characters, {value[:40]!a}, allowed are {MAX_NAME_CHARS} "
                    "printable ones of ASCII; rename the tensor"
                )
        elif name in ("BINPUT", "LONG_BINPUT"):
            if previous in ("GLOBAL", "BINUNICODE"):
                shared.add(value)
            else:
                shared.discard(value)
        elif name in ("BINGET", "LONG_BINGET"):
            if value not in shared:
                raise CheckpointError(f"{where} has one tensor under several names; save copies, or leave them out")
        elif name not in _NUMBERS and name not in _CONTAINERS and name not in _OTHERS:
            raise _no_tensors(where)
        previous = name


def _no_tensors(where: str) -> CheckpointError:
    return CheckpointError(f"{where} holds other things than tensors by name; save only these, or use safetensors")


HeadFiles = CheckpointWeights | TorchFileWeights


def open_head_files(directory: Path, stack: ExitStack) -> HeadFiles:
    """Open the weights in a head's folder, preferably safetensors; the stack closes them. Raises CheckpointError."""
    found = next((file for file in TORCH_FILES if (directory / file).exists()), None)
    if found is None or any(directory.glob("model.safetensors*")):
        return stack.enter_context(CheckpointWeights(directory))
    return TorchFileWeights(directory, found)
