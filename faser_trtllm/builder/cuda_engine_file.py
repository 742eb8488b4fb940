"""The file of a cuda engine (rank0.engine): a safetensors file of weights in the engine's layout.

Tensors are row-major [out, in] in the engine's dtype; q, k and v are one matrix, and so are gate and up. The header's
`__metadata__` has one entry, "faser": a JSON object with version, model (sizes), segments and dtype. Any safetensors
reader can open it.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import EngineFileError, reason_of
from faser_trtllm.models.medusa import MedusaConfig, expected_shapes

VERSION = 1
TYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64"}
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
_OWN_TYPES = {"rope_inv_freq": "float32", "head.target_ids": "int64"}
_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 64 << 20

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


def tensor_shapes(model: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of a model of these sizes, in the file's order. rope_inv_freq is always fp32.

    A model with the object `head` is an EAGLE-3 head: its qkv reads two rows of hidden_size, the normed embedding and
    the normed hidden row, its LM head is over draft_vocab_size tokens, and head.target_ids are int64. With is_mtp in
    that object it is an MTP layer: a decoder's layer behind head.input_proj. With the object `medusa` it is Medusa
    heads (models/medusa.py), and final_norm is the target's.
    """
    if "medusa" in model:
        heads = MedusaConfig(**model["medusa"], hidden_size=model["hidden_size"], vocab_size=model["vocab_size"])
        shapes = {f"medusa.{name}": shape for name, shape in expected_shapes(heads).items()}
        return {"final_norm": (model["hidden_size"],), **shapes}
    head: Mapping[str, Any] | None = model.get("head")
    is_mtp = head is not None and bool(head.get("is_mtp"))
    hidden, head_dim, vocab, inner = (
        model[name] for name in ("hidden_size", "head_dim", "vocab_size", "intermediate_size")
    )
    q_size = model["num_heads"] * head_dim
    qkv_size = q_size + 2 * model["num_kv_heads"] * head_dim
    shapes = {"rope_inv_freq": (head_dim // 2,), "embedding": (vocab, hidden)}
    for i in range(model["num_layers"]):
        layer: dict[str, Shape] = {"qkv": (qkv_size, 2 * hidden)}
        if head is None or is_mtp:
            layer = {"input_norm": (hidden,), "qkv": (qkv_size, hidden)}
        if model["qkv_bias"]:
            layer["qkv_bias"] = (qkv_size,)
        if model["qk_norm"]:
            layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        layer["o"] = (hidden, q_size)
        if model["o_bias"]:
            layer["o_bias"] = (hidden,)
        layer |= {"post_norm": (hidden,), "gate_up": (2 * inner, hidden)}
        if model["mlp_bias"]:
            layer["gate_up_bias"] = (2 * inner,)
        layer["down"] = (hidden, inner)
        if model["mlp_bias"]:
            layer["down_bias"] = (hidden,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not model["tied"]:
        shapes["lm_head"] = (vocab if head is None else head["draft_vocab_size"], hidden)
    if head is not None and is_mtp:
        shapes |= {"head.input_proj": (hidden, 2 * hidden), "head.token_norm": (hidden,), "head.hidden_norm": (hidden,)}
        if head["reads_normed"]:
            shapes["head.target_norm"] = (hidden,)
    elif head is not None:
        shapes |= {"head.fc": (hidden, head["num_features"]), "head.input_norm": (hidden,)}
        shapes["head.hidden_norm"] = (hidden,)
        if head["fc_bias"]:
            shapes["head.fc_bias"] = (hidden,)
        if head["target_ids"]:
            shapes["head.target_ids"] = (head["draft_vocab_size"],)
    return shapes


def type_of(name: str, dtype: str) -> str:
    """The dtype of a tensor of an engine of this dtype."""
    return _OWN_TYPES.get(name, dtype)


def num_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of all tensors."""
    return sum(int(np.prod(shape)) * ITEMSIZES[type_of(name, dtype)] for name, shape in tensor_shapes(model).items())


def write_cuda_file(
    path: Path,
    model: Mapping[str, Any],
    segments: list[int],
    dtype: str,
    tensors: Iterable[tuple[str, Callable[[], Array]]],
    on_tensor: Callable[[str], None],
) -> None:
    """Write a file with one tensor in memory at a time. tensors: bytes in the order of tensor_shapes().

    Raises ValueError for an unexpected tensor (a bug in the builder), OSError from the file system.
    """
    faser = {"version": VERSION, "model": dict(model), "segments": segments, "dtype": dtype}
    header: dict[str, Any] = {"__metadata__": {"faser": json.dumps(faser)}}
    end = 0
    shapes = tensor_shapes(model)
    for name, shape in shapes.items():
        kind = type_of(name, dtype)
        begin, end = end, end + int(np.prod(shape)) * ITEMSIZES[kind]
        header[name] = {"dtype": TYPE_NAMES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // _ALIGNMENT) * _ALIGNMENT - 8)
    expected = iter(shapes)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name, make in tensors:
            array = make()
            begin, end = header[name]["data_offsets"]
            if next(expected, None) != name or array.nbytes != end - begin:
                raise ValueError(f"tensor {name} of {array.nbytes} bytes does not belong here")
            file.write(np.ascontiguousarray(array).data.cast("B"))
            del array
            on_tensor(name)
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"tensor {missing} is missing")


class CudaFile(Closing):
    """An opened file, mapped read-only. model: the sizes; segments: layer boundaries; dtype: of the weights."""

    def __init__(self, path: Path, header: Mapping[str, Any], data_start: int, mapping: mmap.mmap) -> None:
        """open() makes one."""
        faser = json.loads(header["__metadata__"]["faser"])
        self.path = path
        self.model: dict[str, Any] = faser["model"]
        self.segments: tuple[int, ...] = tuple(faser["segments"])
        self.dtype: str = faser["dtype"]
        self._header = header
        self._data_start = data_start
        self._mapping = mapping

    @classmethod
    def open(cls, path: Path) -> CudaFile:
        """Map a file after checking its header and size; EngineFileError otherwise."""
        label = f"{path.parent.name}/{path.name}"
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
                text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise EngineFileError(
                f"{label} cannot be read ({reason_of(error)}); rebuild it with faser build"
            ) from error
        try:
            header = json.loads(text)
            faser = json.loads(header["__metadata__"]["faser"])
        except (ValueError, KeyError, TypeError) as error:
            mapping.close()
            raise EngineFileError(
                f"{label} is not an engine of the cuda backend; build it with faser build --backend cuda"
            ) from error
        try:
            if faser["version"] != VERSION:
                raise EngineFileError(
                    f"{label} has version {faser['version']}, this faser reads {VERSION}; rebuild it with faser build"
                )
            shapes, dtype = tensor_shapes(faser["model"]), faser["dtype"]
            wanted = 8 + length + num_bytes(faser["model"], dtype)
            if len(mapping) != wanted:
                raise EngineFileError(f"{label} has {len(mapping)} bytes, {wanted} were written; rebuild it")
            for name, shape in shapes.items():
                entry = header[name]
                if tuple(entry["shape"]) != shape or entry["dtype"] != TYPE_NAMES[type_of(name, dtype)]:
                    raise EngineFileError(f"{label}: tensor {name} is not as its sizes say; rebuild it")
        except (KeyError, TypeError, ValueError) as error:
            mapping.close()
            raise EngineFileError(f"{label}: the header is damaged ({error}); rebuild it with faser build") from error
        except EngineFileError:
            mapping.close()
            raise
        return cls(path, header, 8 + length, mapping)

    def bytes_of(self, name: str) -> tuple[memoryview, Shape, str]:
        """A tensor's bytes (valid until close), its shape and its dtype; KeyError if there is none of this name."""
        entry = self._header[name]
        begin, end = (self._data_start + offset for offset in entry["data_offsets"])
        return memoryview(self._mapping)[begin:end], tuple(entry["shape"]), type_of(name, self.dtype)

    def close(self) -> None:
        """Unmap the file once no view is left."""
        try:
            self._mapping.close()
        except BufferError:
            return  # the last view unmaps it
