"""The CPU engine: an engine file mapped into memory and run by the native library."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.builder.engine_file import EngineFile
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.engine.cpu.native_model import native_model
from faser_trtllm.errors import ConfigError, EngineFileError, FaserError, InvalidArgumentError
from faser_trtllm.native.structures import FaserBatch
from faser_trtllm.ops.arrays import sampling_address
from faser_trtllm.ops.draft_stop import NativeStop
from faser_trtllm.ops.prune_rows import HostPruning
from faser_trtllm.partition.core_set import CoreSet


class CpuEngine(HostPruning, Closing):
    """Engine (engine/base.py) over one engine file and one core set. Not thread-safe: one caller at a time.

    Inputs are the arrays of a RaggedBatch: int32 and contiguous. Ids, positions or blocks out of range raise
    InvalidArgumentError before anything runs. Each row's result depends only on its own request.
    """

    def __init__(self, file: EngineFile, core_set: CoreSet, spec: EngineSpec, handle: int) -> None:
        self._file = file
        self._core_set = core_set
        self._spec = spec
        self._handle: int | None = handle
        self._library = native.library()
        self._forward = self._library.faser_engine_forward
        stride = self._library.faser_engine_logits_stride(handle)
        # Drafting needs at least one row per request. Pages are touched only when written.
        num_logits = max(spec.max_num_tokens, spec.max_batch_size)
        self._logits = np.zeros((num_logits, stride), np.float32)
        self._logits_address = self._logits.ctypes.data
        self._num_new = np.zeros(spec.max_batch_size, np.int32)
        self._num_new_address = native.address_of_buffer(self._num_new)
        self._batch = FaserBatch()
        self._batch_address = ctypes.addressof(self._batch)
        self._stop = NativeStop(spec.max_batch_size)
        self._block_table: npt.NDArray[np.int32] | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        core_set: CoreSet,
        *,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int | None = None,
        max_num_branches: int = 0,
    ) -> CpuEngine:
        """Map an engine file and allocate its KV memory and workspaces.

        max_seq_len is at most the model's, which is the default. Raises EngineFileError for an unusable file,
        ConfigError for invalid limits, FaserError when memory runs out.
        """
        limits = {
            "num_blocks": num_blocks,
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if tokens_per_block < 16 or tokens_per_block % 16:
            raise ConfigError(f"tokens_per_block is {tokens_per_block}; it must be a multiple of 16")
        file = EngineFile.open(path)
        try:
            sizes: dict[str, Any] = file.header["model"]
            longest = int(sizes["max_seq_len"])
            if max_seq_len is not None and not 1 <= max_seq_len <= longest:
                raise ConfigError(f"max_seq_len is {max_seq_len}, the engine allows 1 to {longest}")
            spec = EngineSpec(
                vocab_size=int(sizes["vocab_size"]),
                max_seq_len=longest if max_seq_len is None else max_seq_len,
                num_layers=int(sizes["num_layers"]),
                num_blocks=num_blocks,
                tokens_per_block=tokens_per_block,
                max_num_tokens=max_num_tokens,
                max_batch_size=max_batch_size,
                segments=tuple(file.header["segments"]),
                max_num_branches=max_num_branches,
                is_head="head" in sizes or "medusa" in sizes,
                block_size=sizes.get("block", {}).get("block_size", 0),
                **{name: int(sizes.get("experts", {}).get(name, 0)) for name in ("num_experts", "top_k")},
            )
            return cls(file, core_set, spec, _create(file, path, core_set, spec))
        except BaseException:
            file.close()
            raise

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def distinct_experts(self) -> float:
        found: float = self._library.faser_engine_distinct_experts(self._open_handle())
        return found

    @property
    def memory_bytes(self) -> int:
        """Bytes of KV memory and native workspaces, without the mapped weights."""
        num_bytes: int = self._library.faser_engine_memory_bytes(self._open_handle())
        return num_bytes

    def attach(self, target: CpuEngine) -> None:
        """Connect this head to its target, which then keeps hidden rows for it. Call once before either runs, and
        close the target last. Raises EngineFileError if the two do not fit."""
        model: dict[str, Any] = self._file.header["model"]
        head: dict[str, Any] = model.get("head") or model.get("block") or {"layers": [target.spec.num_layers]}
        layers = np.array(head["layers"], np.int32)
        status = self._library.faser_engine_attach_head(
            self._open_handle(), target._open_handle(), native.address_of_buffer(layers), layers.size
        )
        if status == native.FASER_OUT_OF_MEMORY:
            raise FaserError(
                f"memory ran out for the hidden rows of {self._spec.num_blocks} KV blocks of "
                f"{self._spec.tokens_per_block} tokens, lower kv_cache_config.max_tokens"
            )
        if status:
            raise EngineFileError(
                f"the draft head of {self._file.path.parent.parent} does not fit this target: it must read layers of "
                f"this target (it reads {layers.tolist()}), the same as a head that it replaces, and have the target's "
                "hidden_size and vocab_size; rebuild it for this target with faser build"
            )

    def exchange(self, other: CpuEngine) -> None:
        """Swap weights and KV memory with another engine. Call between two passes. Raises ConfigError if the engines
        differ in kind or limits; only the number of layers and segments may differ."""
        for field in dataclasses.fields(EngineSpec):
            mine, its = getattr(self._spec, field.name), getattr(other.spec, field.name)
            if mine != its and field.name not in ("num_layers", "segments"):
                raise ConfigError(f"{field.name} is {its}, but {mine} in the engine that it is to replace")
        for name in ("_file", "_handle", "_core_set", "_spec"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, its)
            setattr(other, name, mine)
        for engine in (self, other):
            engine._block_table = None

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        segments = self._spec.segments
        if not 0 <= segment < len(segments) - 1:
            raise InvalidArgumentError(f"segment is {segment}, allowed is 0 to {len(segments) - 2}")
        logits = self._run(batch, segments[segment], segments[segment + 1])
        return logits if segment == len(segments) - 2 else None

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        return self._run(batch, 0, self._spec.num_layers)

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        rows = np.ascontiguousarray(rows, np.int32)
        status = self._library.faser_engine_compact_rows(self._open_handle(), native.address_of_buffer(rows), rows.size)
        if status:
            native.check(status, f"keeping rows {rows.tolist()}")

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        rows = np.ascontiguousarray(rows, np.int32)
        candidates = np.ascontiguousarray(candidates, np.int32)
        if candidates.ndim != 2 or candidates.shape[0] != rows.size:
            raise ValueError(f"{rows.size} rows need candidates [{rows.size}, n], not {list(candidates.shape)}")
        scores = np.empty(candidates.shape, np.float32)
        status = self._library.faser_engine_early_exit(
            self._open_handle(),
            native.address_of_buffer(rows),
            rows.size,
            native.address_of_buffer(candidates),
            candidates.shape[1],
            native.address_of_buffer(scores),
        )
        if status:
            native.check(status, f"early exit of {rows.size} rows")
        return scores

    def copy_kv(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy KV between blocks, and the hidden rows that are kept for a head.

        copies: contiguous int32 [4, n] of source block, target block, first offset and end offset.
        """
        status = self._library.faser_engine_copy_kv(
            self._open_handle(), copies.shape[1], *(native.address_of_buffer(column) for column in copies)
        )
        native.check(status, f"copying KV between {copies.shape[1]} pairs of blocks")

    def hidden_rows(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Return a copy of the last segment's hidden rows, fp32 [num_rows, hidden_size]; num_rows is their number."""
        hidden = np.empty((num_rows, self._file.header["model"]["hidden_size"]), np.float32)
        native.check(
            self._library.faser_engine_hidden_rows(self._open_handle(), num_rows, native.address_of_buffer(hidden)),
            f"reading {num_rows} hidden rows",
        )
        return hidden

    @property
    def core_set(self) -> CoreSet:
        """The core set that the next call runs on."""
        return self._core_set

    def use(self, core_set: CoreSet) -> None:
        """Switch to another core set from the next call on; results do not change. The caller owns both core sets."""
        if core_set is not self._core_set:
            native.check(self._library.faser_engine_set_pool(self._open_handle(), core_set.handle), "changing threads")
            self._core_set = core_set

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        self._set_batch(draft_batch.batch)
        num_requests, stop = draft_batch.batch.num_requests, draft_batch.stop
        num_tokens, num_drafts = draft_batch.num_tokens, draft_batch.num_drafts
        num_new_drafts, max_draft_len = draft_batch.num_new_drafts, draft_batch.max_draft_len
        for counts in (num_tokens, num_drafts, num_new_drafts):
            if counts.dtype != np.int32 or counts.size < num_requests or not counts.flags.c_contiguous:
                raise ValueError(f"counts are {counts.dtype} [{counts.size}], need contiguous int32 [{num_requests}]")
        status = self._library.faser_draft(
            self._handle,
            self._core_set.handle,
            self._batch_address,
            sampling_address(draft_batch.sampling),
            native.address_of_buffer(num_tokens),
            native.address_of_buffer(num_drafts),
            native.address_of_buffer(num_new_drafts),
            max_draft_len,
            None if stop is None else self._stop.address(stop, max_draft_len),
            self._logits_address,
            self._num_new_address,
        )
        if status:
            native.check(status, "drafting")
        return self._num_new[:num_requests]

    def close(self) -> None:
        """Free KV memory and workspaces and unmap the weights; the core set stays open."""
        handle, self._handle = self._handle, None  # first, since a signal may interrupt, and close() be called again
        if handle is not None:
            self._library.faser_engine_destroy(handle)
            self._file.close()

    def _run(self, batch: RaggedBatch, first_layer: int, last_layer: int) -> npt.NDArray[np.float32]:
        self._set_batch(batch)
        logit_rows = batch.logit_rows
        num_logits = logit_rows.size
        status = self._forward(
            self._handle,
            self._batch_address,
            first_layer,
            last_layer,
            native.address_of_buffer(logit_rows),
            num_logits,
            self._logits_address,
        )
        if status:
            native.check(status, f"a pass of {batch.num_rows} rows of {batch.num_requests} requests")
        return self._logits[:num_logits]

    def _open_handle(self) -> int:
        if self._handle is None:
            raise ValueError("the engine is closed")
        return self._handle

    def _set_batch(self, batch: RaggedBatch) -> None:
        self._open_handle()
        slots, cu_rows, token_ids, positions = batch.slots, batch.cu_rows, batch.token_ids, batch.positions
        num_rows = token_ids.size
        if cu_rows.size != slots.size + 1 or positions.size != num_rows:
            raise ValueError(
                f"{slots.size} slots need cu_rows of {slots.size + 1}, not {cu_rows.size}, "
                f"and {num_rows} token ids as many positions, not {positions.size}"
            )
        table = batch.block_table
        struct = self._batch
        if table is not self._block_table:
            self._check_block_table(table)
            self._block_table = table
            struct.block_table = native.address_of_buffer(table)
            struct.max_blocks_per_seq = table.shape[1]
        struct.num_requests = slots.size
        struct.num_rows = num_rows
        struct.slots = native.address_of_buffer(slots)
        struct.cu_rows = native.address_of_buffer(cu_rows)
        struct.token_ids = native.address_of_buffer(token_ids)
        struct.positions = native.address_of_buffer(positions)
        parents = batch.branch_parents
        struct.num_branches = 0 if parents is None else parents.size
        struct.branch_parents = None if parents is None else native.address_of_buffer(parents)

    def _check_block_table(self, table: npt.NDArray[np.int32]) -> None:
        if table.dtype != np.int32 or table.ndim != 2 or not table.flags.c_contiguous:
            raise ValueError(f"block_table is {table.dtype} {table.shape}, need contiguous int32 of two axes")
        num_slots = self._spec.max_batch_size + self._spec.max_num_branches
        if table.shape[0] < num_slots:
            raise ValueError(f"block_table has {table.shape[0]} rows, there are {num_slots} slots")


def _create(file: EngineFile, path: Path, core_set: CoreSet, spec: EngineSpec) -> int:
    if spec.block_size > spec.max_num_tokens:
        raise ConfigError(
            f"max_num_tokens is {spec.max_num_tokens}; it must be at least the block drafter's block_size "
            f"({spec.block_size})"
        )
    model, sizes = native_model(file, spec.max_seq_len), file.header["model"]
    status = ctypes.c_int32()
    handle: int | None = native.library().faser_engine_create(
        ctypes.byref(model),
        core_set.handle,
        spec.num_blocks + spec.max_num_branches,
        spec.tokens_per_block,
        spec.max_num_tokens,
        spec.max_batch_size + spec.max_num_branches,
        ctypes.byref(status),
    )
    if handle is None:
        if status.value == native.FASER_OUT_OF_MEMORY:
            fewer = "num_branches, " if spec.max_num_branches else ""
            raise FaserError(
                f"memory ran out for {spec.num_kv_blocks} KV blocks of {spec.tokens_per_block} tokens and "
                f"{spec.max_num_tokens} rows, lower {fewer}kv_cache_config.max_tokens or max_num_tokens"
            )
        raise EngineFileError(
            f"{path.name} describes a model that the CPU engine cannot run, since one of these does not hold: head_dim "
            f"({sizes['head_dim']}) is even and at most 256, hidden_size ({sizes['hidden_size']}) is even, output_ids "
            "are ascending, and all else is as faser build writes it; rebuild it with faser build"
        )
    return handle
