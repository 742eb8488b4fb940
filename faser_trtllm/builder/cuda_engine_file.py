"""The file of a cuda engine (rank0.engine): a safetensors file of weights in the engine's layout.

Tensors are row-major [out, in] in the engine's dtype; q, k and v are one matrix, and so are gate and up. The header's
`__metadata__` has one entry, "faser": a JSON object with version, model (sizes), segments and dtype. Any safetensors
reader can open the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.engine_file import check_block, check_counts, check_segments
from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import EngineFileError, reason_of
from faser_trtllm.json_text import parse_json
from faser_trtllm.models.config import layer_windows
from faser_trtllm.models.fused import Part, Shape, fused_tensors
from faser_trtllm.models.heads.medusa import MedusaConfig, expected_shapes
from faser_trtllm.models.mxfp4 import BLOCK_SIZE
from faser_trtllm.models.safetensors_file import SafetensorError, SafetensorsFile

VERSION = 1
TYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "uint8": "U8"}
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "uint8": 1}
MXFP4_SUFFIX = "_mxfp4"
"""Ends the names of experts' matrices in MXFP4: a row is the bytes of its numbers, and then those of its scales."""
_OWN_TYPES = {"rope_inv_freq": "float32", "head.target_ids": "int64", "output_ids": "int64"}
_ALIGNMENT = 4096
_MAX_MEDUSA_BLOCKS = 10_000

Array = npt.NDArray[Any]


def tensor_parts(model: Mapping[str, Any]) -> dict[str, tuple[Part, ...]]:
    """Return {tensor: parts that are stacked in it} (models/fused.py), in the file's order. model: the header's sizes.

    rope_inv_freq is always fp32; output_ids and an EAGLE-3 head's head.target_ids are int64. A model with
    expert_quantization "mxfp4" has its experts' matrices in that format (MXFP4_SUFFIX). A model with `medusa`
    (models/heads/medusa.py) has the tensors of Medusa heads and final_norm. ValueError for too many Medusa blocks.
    """
    hidden, head = model["hidden_size"], model.get("head", {})
    if "medusa" in model:
        if model["medusa"]["num_heads"] * model["medusa"]["num_layers"] > _MAX_MEDUSA_BLOCKS:
            raise ValueError(f"medusa is {model['medusa']!r:.80}, at most {_MAX_MEDUSA_BLOCKS} blocks are read")
        heads = MedusaConfig(**model["medusa"], hidden_size=hidden, vocab_size=model["vocab_size"])
        norm: dict[str, tuple[Part, ...]] = {"final_norm": (("model.norm.weight", (hidden,)),)}
        return norm | {f"medusa.{name}": ((name, shape),) for name, shape in expected_shapes(heads).items()}
    parts: dict[str, tuple[Part, ...]] = {"rope_inv_freq": (("rope_inv_freq", (model["head_dim"] // 2,)),)}
    is_mxfp4 = "expert_quantization" in model
    if is_mxfp4 and (model["expert_quantization"] != "mxfp4" or "experts" not in model):
        raise ValueError(f"expert_quantization is {model['expert_quantization']!r:.80}")
    for name, found in fused_tensors(model).items():
        is_packed = is_mxfp4 and name.endswith((".expert_gate_up", ".expert_down"))
        parts[f"{name}{MXFP4_SUFFIX}" if is_packed else name] = found
    if "num_outputs" in model:
        parts["output_ids"] = (("output_ids", (model["num_outputs"],)),)
    if model["tied"]:
        del parts["lm_head"]
    if head.get("is_mtp"):
        if head["reads_normed"]:
            parts["head.target_norm"] = (("target.norm.weight", (hidden,)),)
    elif head:
        parts["head.input_norm"] = parts.pop("layers.0.input_norm")
        if head["target_ids"]:
            parts["head.target_ids"] = (("target_ids", (head["draft_vocab_size"],)),)
    return parts


def tensor_shapes(model: Mapping[str, Any]) -> dict[str, Shape]:
    """Return {tensor: shape} of a model, in the file's order."""
    shapes = {}
    for name, parts in tensor_parts(model).items():
        rest = parts[0][1][1:]
        if name.endswith(MXFP4_SUFFIX):
            if rest[0] % BLOCK_SIZE:
                raise ValueError(f"{name} has rows of {rest[0]}, no multiple of {BLOCK_SIZE}")
            rest = (rest[0] // 2 + rest[0] // BLOCK_SIZE,)
        shapes[name] = (sum(shape[0] for _, shape in parts), *rest)
    return shapes


def type_of(name: str, dtype: str) -> str:
    """Return the dtype of a tensor in an engine whose weights are `dtype`."""
    return "uint8" if name.endswith(MXFP4_SUFFIX) else _OWN_TYPES.get(name, dtype)


def num_bytes(model: Mapping[str, Any], dtype: str) -> int:
    return sum(int(np.prod(shape)) * ITEMSIZES[type_of(name, dtype)] for name, shape in tensor_shapes(model).items())


def write_cuda_file(
    path: Path,
    model: Mapping[str, Any],
    segments: list[int],
    dtype: str,
    tensors: Iterable[tuple[str, Callable[[], Array]]],
    on_tensor: Callable[[str], None],
) -> None:
    """Write a file with one tensor in memory at a time. tensors: (name, maker) in the order of tensor_shapes().

    Calls on_tensor with each written name. ValueError for an unexpected tensor (a bug in the builder); OSError.
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


def _check_ids(ids: Array, vocab_size: int) -> None:
    """Raise ValueError unless the ids ascend strictly within the vocabulary."""
    if ids[0] < 0 or ids[-1] >= vocab_size or (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"output_ids do not rise from 0 to {vocab_size - 1}")


class CudaFile(Closing):
    """An open file, mapped read-only. model: sizes. segments: layer boundaries. dtype: type of the weights."""

    def __init__(self, file: SafetensorsFile, faser: Mapping[str, Any]) -> None:
        """Use open() instead."""
        self.model: dict[str, Any] = faser["model"]
        self.segments: tuple[int, ...] = tuple(faser["segments"])
        self.dtype: str = faser["dtype"]
        self._file = file

    @classmethod
    def open(cls, path: Path) -> CudaFile:
        """Map a file and check its header and size; raises EngineFileError."""
        label = f"{path.parent.name}/{path.name}"
        try:
            file = SafetensorsFile(path)
        except OSError as error:
            raise EngineFileError(
                f"{label} cannot be read ({reason_of(error)}); rebuild it with faser build"
            ) from error
        except SafetensorError as error:
            raise EngineFileError(
                f"{label} is not an engine of the cuda backend, or damaged ({error}); build it with faser build "
                "--backend cuda"
            ) from error
        with ExitStack() as guard:
            guard.enter_context(file)
            try:
                faser = parse_json(file.metadata["faser"], unique_names=True, finite=True)
                if faser["version"] != VERSION:
                    raise EngineFileError(
                        f"{label} has version {faser['version']}, this faser reads {VERSION}; rebuild it with faser "
                        "build"
                    )
                check_counts(faser["model"], len(file.entries))
                layer_windows(faser["model"])
                check_segments(faser["segments"], faser["model"]["num_layers"])
                if "block" in faser["model"]:
                    check_block(faser["model"]["block"], faser["model"]["num_layers"])
                for name, shape in tensor_shapes(faser["model"]).items():
                    entry, kind = file.entries[name], type_of(name, faser["dtype"])
                    if entry.shape != shape or entry.dtype != TYPE_NAMES[kind]:
                        raise EngineFileError(
                            f"{label}: tensor {name} is {entry.dtype} of shape {list(entry.shape)}; its header "
                            f"requires {TYPE_NAMES[kind]} of {list(shape)}; rebuild it with faser build"
                        )
                if "num_outputs" in faser["model"]:
                    _check_ids(file.array("output_ids", "i8"), faser["model"]["vocab_size"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise EngineFileError(
                    f"{label}: the header is damaged ({error!r}); rebuild it with faser build"
                ) from error
            guard.pop_all()
        return cls(file, faser)

    def array(self, name: str) -> tuple[Array, str]:
        """Return a tensor's bits as integers (a read-only view) and its dtype; KeyError if there is none."""
        dtype = type_of(name, self.dtype)
        return self._file.array(name, f"i{ITEMSIZES[dtype]}"), dtype

    def close(self) -> None:
        """Unmap the file as soon as no array views it."""
        self._file.close()
