"""The CPU engine's file (rank0.engine): packed weights that the engine memory-maps and reads in place.

Layout: b"FASERENG", uint32 version, uint32 header_len, a JSON header of header_len bytes (padded with spaces,
so that the data starts at a multiple of 4096), then tensors, each at a multiple of 64 bytes. All is
little-endian; offsets count from the start of the file. Shapes and paddings: plugins/cpu/faser_cpu.h.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import EngineFileError, reason_of
from faser_trtllm.json_text import parse_json
from faser_trtllm.models.config import layer_windows
from faser_trtllm.models.experts import experts_of
from faser_trtllm.models.fused import fused_tensors
from faser_trtllm.models.quantized_weight import QuantizedWeight, Scheme, scheme_of

MAGIC = b"FASERENG"
TENSORRT_MAGIC = b"FASERTRT"  # builder/plan_file.py
VERSION = 1
PANEL = 64
TENSOR_ALIGNMENT = 64
DATA_ALIGNMENT = 4096
_PREFIX = struct.Struct("<8sII")
MAX_SIZE = 2**31 - 1
_MAX_HEADER_BYTES = 8 << 20  # enough for 70,000 tensors
_MAX_EXPERTS = 1 << 17  # in all layers

Array = npt.NDArray[Any]
TensorSource = Array | Iterable[Array] | Callable[[], Array | Iterable[Array]]
"""An array, its consecutive parts, or a function that returns either."""

MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_seq_len",
    "rms_norm_eps",
    "rope_attention_factor",
    "tied",
)
ROW_MAJOR = ("embedding", "block.markov_in", "block.predecessors", "block.successors")
"""Matrices whose rows are looked up, in bf16; all other matrices are packed."""
_OF_EXPERTS = (".router_bias", ".expert_gate_up_bias", ".expert_down_bias")  # required where they exist
FRACTIONS = ("rms_norm_eps", "rope_attention_factor")  # the others are integers


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def pack_matrix(weight: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Pack bf16 bits [out, in] (uint16) into panels [ceil(out / 64), in_padded / 2, 64] uint32.

    Element [p, i, j] holds the weights of output 64 p + j for inputs 2 i (low half) and 2 i + 1 (high half);
    in_padded is `in` rounded up to 32; padding is zero. ValueError for other types.
    """
    if weight.dtype != np.uint16 or weight.ndim != 2:
        raise ValueError(f"pack_matrix takes a uint16 matrix, got {weight.dtype} of {weight.ndim} dimensions")
    num_out, num_in = weight.shape
    padded_out, padded_in = round_up(num_out, PANEL), round_up(num_in, 32)
    if (padded_out, padded_in) != weight.shape:
        weight = np.pad(weight, ((0, padded_out - num_out), (0, padded_in - num_in)))
    pairs = np.ascontiguousarray(weight).view("<u4").reshape(-1, PANEL, padded_in // 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1))


def pack_quantized(weight: QuantizedWeight) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Pack into panels: words [ceil(out / 64), in_padded * bits / 32, 64] and scales [ceil(out / 64), groups, 64].

    Word [p, i, j] holds the integers of output 64 p + j for inputs n i to n i + n - 1, n = 32 / bits, the first in the
    lowest bits; in_padded is `in` rounded up to 32; padding is zero.
    """
    num_out, num_in = weight.shape
    padded_out = round_up(num_out, PANEL)
    values = weight.values.view(np.uint8)
    padding = (round_up(num_in, 32) - num_in) * weight.bits // 8
    words = np.pad(values, ((0, padded_out - num_out), (0, padding))).view("<u4")
    scales = np.pad(weight.scales, ((0, padded_out - num_out), (0, 0)))
    packed = (array.reshape(-1, PANEL, array.shape[1]).transpose(0, 2, 1) for array in (words, scales))
    words, scales = map(np.ascontiguousarray, packed)
    return words, scales


def tensor_sizes(model: dict[str, Any], scheme: Scheme | None = None) -> dict[str, tuple[int, bool]]:
    """Return {name: (nbytes, required)} for every tensor that a model may have. scheme: None for bf16.

    Optional members of model:
    - head: an EAGLE-3 head's num_features, draft_vocab_size, norm_before_residual, feeds_normed and num_fc_norms
      (faser_cpu.h), and the target's layers; an MTP layer also has is_mtp and reads_normed;
    - medusa: num_heads and num_layers of Medusa heads (faser_cpu.h), to which the other members then belong;
    - block (models/heads/head.py), experts (models/experts.py);
    - num_outputs: tokens of a draft model's LM head that has fewer than the target's.
    """
    if "medusa" in model:
        return _medusa_sizes(model["hidden_size"], model["vocab_size"], **model["medusa"])
    sizes = {"rope_inv_freq": (model["head_dim"] // 2 * 4, True)}
    for name, parts in fused_tensors(model).items():
        num_rows = sum(round_up(shape[0], row_multiple(name)) for _, shape in parts)
        is_optional = name.endswith(("_bias", ".q_norm", ".k_norm")) and not name.endswith(_OF_EXPERTS)
        num_in = math.prod(parts[0][1][1:])
        if len(parts[0][1]) != 2:
            sizes[name] = (num_rows * num_in * 4, not is_optional)
        elif name not in ROW_MAJOR:
            sizes |= _matrix_sizes(name, num_rows, num_in, scheme_for(name, scheme))
        elif name != "embedding" or not model["tied"]:
            sizes[name] = (num_rows * num_in * 2, True)
    if "num_outputs" in model:
        sizes["output_ids"] = (model["num_outputs"] * 4, True)
    head = model.get("head")
    if head is not None and not head.get("is_mtp"):
        num_ids = head["draft_vocab_size"]
        sizes["head.target_ids"] = (num_ids * 4, num_ids < model["vocab_size"])
    return sizes


def row_multiple(name: str) -> int:
    """Return the multiple that each part's rows in a fused tensor are padded to: PANEL for gate, up and experts."""
    return PANEL if name.endswith(("gate_up", "gate_up_bias", "expert_down", "expert_down_bias")) else 1


def scheme_for(name: str, scheme: Scheme | None) -> Scheme | None:
    """Return the scheme of one matrix in a model that is quantized with `scheme`; None for bf16.

    It covers the layers without routers and shared gates, and the LM head if scheme.lm_head; MXFP4 covers experts only.
    """
    if scheme is not None and scheme.is_mxfp4:
        return scheme if ".expert_" in name else None
    is_of_layer = name.startswith("layers.") and not name.endswith((".router", ".shared_gate"))
    is_quantized = is_of_layer or (name == "lm_head" and scheme is not None and scheme.lm_head)
    return scheme if is_quantized else None


def _medusa_sizes(hidden: int, vocab: int, num_heads: int, num_layers: int) -> dict[str, tuple[int, bool]]:
    num_blocks = num_heads * num_layers
    return {
        **_matrix_sizes("medusa.residual", num_blocks * round_up(hidden, PANEL), hidden, None),
        "medusa.residual_bias": (num_blocks * round_up(hidden, PANEL) * 4, True),
        **_matrix_sizes("lm_head", num_heads * round_up(vocab, PANEL), hidden, None),
    }


def _matrix_sizes(name: str, num_out: int, num_in: int, scheme: Scheme | None) -> dict[str, tuple[int, bool]]:
    entries = round_up(num_out, PANEL) * round_up(num_in, 32)
    if scheme is None:
        return {name: (entries * 2, True)}
    num_groups = num_in // scheme.group_size if scheme.group_size else 1
    scales = round_up(num_out, PANEL) * num_groups * 4
    return {name: (entries * scheme.bits // 8, True), f"{name}_scales": (scales, True)}


def write_engine_file(
    path: Path,
    model: dict[str, Any],
    segments: list[int],
    tensors: Iterable[tuple[str, TensorSource]],
    on_tensor: Callable[[str], None] | None = None,
    scheme: Scheme | None = None,
) -> None:
    """Write an engine file with one tensor, or one part of it, in memory at a time.

    Calls on_tensor with each written name. ValueError for an unexpected tensor name or size (a bug in the builder),
    OSError from the file system.
    """
    sizes = tensor_sizes(model, scheme)
    if scheme is not None:
        model = model | {"quantization": dataclasses.asdict(scheme)}
    check_segments(segments, model["num_layers"])
    # Offsets are known only after the data: reserve room for the largest possible header.
    longest = {name: {"offset": 2**63, "nbytes": nbytes} for name, (nbytes, _) in sizes.items()}
    data_start = round_up(_PREFIX.size + len(_header_json(2**63, model, segments, longest)), DATA_ALIGNMENT)
    written: dict[str, dict[str, int]] = {}
    with path.open("wb") as file:
        file.seek(data_start)
        for name, source in tensors:
            if name not in sizes or name in written:
                raise ValueError(f"tensor {name} does not belong to this engine file")
            offset = round_up(file.tell(), TENSOR_ALIGNMENT)
            file.seek(offset)
            _write(file, source)
            nbytes = file.tell() - offset
            if nbytes != sizes[name][0]:
                raise ValueError(f"tensor {name} of {nbytes} bytes does not belong to this engine file")
            written[name] = {"offset": offset, "nbytes": nbytes}
            if on_tensor is not None:
                on_tensor(name)
        missing = [name for name, (_, required) in sizes.items() if required and name not in written]
        if missing:
            raise ValueError(f"tensor {missing[0]} is missing from this engine file")
        file_size = round_up(file.tell(), TENSOR_ALIGNMENT)
        file.truncate(file_size)
        header = _header_json(file_size, model, segments, written)
        file.seek(0)
        file.write(_PREFIX.pack(MAGIC, VERSION, data_start - _PREFIX.size))
        file.write(header.ljust(data_start - _PREFIX.size))
        file.flush()
        os.fsync(file.fileno())


def _write(file: BinaryIO, source: TensorSource) -> None:
    made = source() if callable(source) else source
    for part in [made] if isinstance(made, np.ndarray) else made:
        file.write(np.ascontiguousarray(part).data.cast("B"))


def _header_json(
    file_size: int, model: dict[str, Any], segments: list[int], tensors: dict[str, dict[str, int]]
) -> bytes:
    header = {"file_size": file_size, "model": model, "segments": segments, "tensors": tensors}
    return json.dumps(header, separators=(",", ":")).encode()


def check_segments(segments: list[int], num_layers: int) -> None:
    """Raise ValueError unless the boundaries ascend strictly from 0 to num_layers."""
    rising = all(a < b for a, b in itertools.pairwise(segments))
    if len(segments) < 2 or segments[0] != 0 or segments[-1] != num_layers or not rising:
        raise ValueError(f"segments {segments} do not rise from 0 to {num_layers}")


class EngineFile(Closing):
    """An engine file mapped read-only; addresses stay valid until close().

    header: the JSON header: file_size, model, segments and tensors.
    """

    def __init__(self, path: Path, header: dict[str, Any], mapping: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self._mapping: mmap.mmap | None = mapping
        # Keep only the number: a live view would prevent closing the mapping.
        self._base = int(np.frombuffer(mapping, np.uint8).ctypes.data)

    @classmethod
    def open(cls, path: Path) -> EngineFile:
        """Check magic, version, size and the placement of all tensors, and map the file; raises EngineFileError."""
        label = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = _read_header(file.read(_PREFIX.size), file.read, size, label)
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise EngineFileError(
                f"{label} cannot be read ({reason_of(error)}); rebuild it with faser build"
            ) from error
        return cls(path, header, mapping)

    def address(self, name: str) -> int | None:
        """Return the address of a tensor's first byte (64-byte aligned), or None if the file has no such tensor."""
        if self._mapping is None:
            raise ValueError(f"{self.path.name} is closed")
        entry = self.header["tensors"].get(name)
        return None if entry is None else self._base + int(entry["offset"])

    def array(self, name: str, dtype: npt.DTypeLike) -> Array:
        """Return a copy of a tensor as a flat array of this dtype; KeyError if the file has no such tensor."""
        if self._mapping is None:
            raise ValueError(f"{self.path.name} is closed")
        entry = self.header["tensors"][name]
        start = entry["offset"]
        return np.frombuffer(self._mapping[start : start + entry["nbytes"]], dtype)

    def close(self) -> None:
        """Unmap the file, which makes its addresses invalid. Idempotent."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


def _read_header(prefix: bytes, read: Callable[[int], bytes], size: int, label: str) -> dict[str, Any]:
    if len(prefix) < _PREFIX.size:
        raise EngineFileError(f"{label}: {size} bytes are too few for an engine file; rebuild it with faser build")
    magic, version, header_len = _PREFIX.unpack(prefix)
    if magic == TENSORRT_MAGIC:
        raise EngineFileError(
            f"{label} is a TensorRT engine, and what was asked for runs on cpu engines only; build with faser build "
            "--backend cpu"
        )
    if prefix[8:9] == b"{":  # safetensors: the length of a JSON header, and the header
        raise EngineFileError(
            f"{label} is an engine of the cuda backend, and what was asked for runs on cpu engines only; build with "
            "faser build --backend cpu"
        )
    if magic != MAGIC:
        raise EngineFileError(f"{label} is not an engine file of faser; rebuild it with faser build")
    if version != VERSION:
        raise EngineFileError(f"{label} has version {version}, this faser reads {VERSION}; rebuild it with faser build")
    if header_len > min(size, _MAX_HEADER_BYTES):
        raise EngineFileError(
            f"{label}: a header of {header_len} bytes in a file of {size}, "
            "the file is truncated or damaged; rebuild it with faser build"
        )
    try:
        header = parse_json(read(header_len), unique_names=True, finite=True)
        file_size = int(header["file_size"])
        if file_size == size:
            _check_header(header)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise EngineFileError(f"{label}: the header is damaged ({error}); rebuild it with faser build") from error
    if file_size > size:
        raise EngineFileError(
            f"{label}: {size} of {file_size} bytes, the file is truncated; rebuild it with faser build"
        )
    if file_size < size:
        raise EngineFileError(f"{label}: {size} bytes where {file_size} were written; rebuild it with faser build")
    return header  # type: ignore[no-any-return]


def check_counts(model: Mapping[str, Any], num_tensors: int) -> None:
    """Raise ValueError, KeyError or TypeError for impossible counts, before they are used to list tensors.

    Layers are bounded by the file's tensors, fc norms by the layers that a head reads, and experts by _MAX_EXPERTS.
    Medusa heads are not bounded by tensors, because CPU engines stack the tensors of all heads.
    """
    medusa, head = model.get("medusa", {}), model.get("head", {})
    if "num_fc_norms" in head and head["num_fc_norms"] not in (0, 1, len(head["layers"])):
        raise ValueError(f"model.head is {head!r:.80}")
    if any(not isinstance(n, int) or not 1 <= n <= MAX_SIZE for n in medusa.values()):
        raise ValueError(f"model.medusa is {medusa!r:.80}")
    num_outputs = model.get("num_outputs", 1)
    if not isinstance(num_outputs, int) or not 1 <= num_outputs <= model["vocab_size"]:
        raise ValueError(f"model.num_outputs is {num_outputs!r:.80}")
    if "num_outputs" in model and (model["tied"] or model.keys() & {"head", "medusa", "block"}):
        raise ValueError("model.num_outputs is of a model whose LM head is its own")
    if not isinstance(model["num_layers"], int) or not 0 <= model["num_layers"] <= num_tensors:
        raise ValueError(f"model.num_layers is {model['num_layers']!r:.80} in a file of {num_tensors} tensors")
    norms_all_heads = model.get("norms_all_heads", False)
    if type(norms_all_heads) is not bool or (norms_all_heads and not model.get("qk_norm", True)):
        raise ValueError(f"model.norms_all_heads is {norms_all_heads!r:.80}")
    if "experts" in model:
        experts = experts_of(model["experts"])
        is_own = experts.intermediate_size == model["intermediate_size"]
        if not is_own or experts.num_experts * model["num_layers"] > _MAX_EXPERTS:
            raise ValueError(f"model.experts is {model['experts']!r:.200}")


def _check_head(head: dict[str, Any]) -> None:
    numbers = [*head["layers"], *(head[name] for name in ("num_features", "draft_vocab_size", "norm_before_residual"))]
    numbers += [head.get(name, 0) for name in ("is_mtp", "reads_normed", "feeds_normed")]
    if not head["layers"] or any(not isinstance(number, int) or not 0 <= number <= MAX_SIZE for number in numbers):
        raise ValueError(f"model.head is {head!r:.80}")


def check_block(block: Mapping[str, Any], num_layers: int) -> None:
    """Raise ValueError, KeyError or TypeError for impossible sizes of a block drafter."""
    lists = [block[name] for name in ("layers", "windows", "causal")]
    factors = [block[name] for name in ("logit_softcap", "logit_scale", "embedding_scale")]
    sizes = ["num_features", "block_size", "first_slot", "mask_token_id", "markov_rank", "selector_rank"]
    sizes += ["selector_top_k", "conv_taps", "conv_group_size"]
    numbers = [*itertools.chain(*lists), *(block[name] for name in sizes)]
    is_wrong = any(not isinstance(number, int) or not 0 <= number <= MAX_SIZE for number in numbers)
    is_wrong |= any(not isinstance(factor, int | float) or not 0 <= factor <= MAX_SIZE for factor in factors)
    if is_wrong or not lists[0] or len(lists[1]) != num_layers or len(lists[2]) != num_layers:
        raise ValueError(f"model.block is {block!r:.80}")


def _check_header(header: dict[str, Any]) -> None:
    """Check the numbers by which the engine indexes memory; raises ValueError, KeyError or TypeError."""
    model, tensors = header["model"], header["tensors"]
    for field in MODEL_FIELDS:
        value, types = model[field], int | float if field in FRACTIONS else int
        if not isinstance(value, types) or not 0 <= value <= MAX_SIZE:
            raise ValueError(f"model.{field} is {value!r:.80}")
    check_counts(model, len(tensors))
    layer_windows(model)
    check_segments(header["segments"], model["num_layers"])
    if "head" in model:
        _check_head(model["head"])
    if "block" in model:
        check_block(model["block"], model["num_layers"])
    sizes = tensor_sizes(model, scheme_of(model))
    for name, entry in tensors.items():
        offset, nbytes = entry["offset"], entry["nbytes"]
        if name not in sizes or nbytes != sizes[name][0]:
            raise ValueError(f"tensor {name} has {nbytes} bytes")
        if not isinstance(offset, int) or offset % TENSOR_ALIGNMENT or offset < 0:
            raise ValueError(f"tensor {name} is at {offset}")
        if offset + nbytes > header["file_size"]:
            raise ValueError(f"tensor {name} ends beyond the file")
    for name, (_, required) in sizes.items():
        if required and name not in tensors:
            raise ValueError(f"tensor {name} is missing")
