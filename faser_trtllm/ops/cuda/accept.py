"""Rejection sampling on the device.

With a small vocabulary, one launch processes all rows, one block per row. Larger rows are cut into parts of
PART_ENTRIES, one block each, in up to five launches (Stages). The later launches only process rows that need them:
greedy rows, seeded rows without filters and drafts that pass their test are read once. top_k and top_p need no sort.
Then one thread per request goes through its rows. All features of ops.accept are supported; penalties, bias, bad words
and min_tokens need `edited_logits`. Sums are over integers, so results do not depend on threads or parts.
plugins/cuda/README.md has times.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

from faser_trtllm import native
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, SamplingArray
from faser_trtllm.ops.cuda.driver import Argument, Launcher, PackedArguments
from faser_trtllm.ops.cuda.tensors import Pointer, pointer, type_name

__all__ = [
    "MAX_VOCAB_SIZE",
    "PART_ENTRIES",
    "ROW_REFUSED",
    "STEM",
    "Stages",
    "accept",
    "launch_stages",
    "stages_of",
    "workspace_bytes",
    "workspace_pointer",
]

STEM = "accept"
NUM_ROW_THREADS = 512
NUM_REQUEST_THREADS = 128
MAX_VOCAB_SIZE = 1 << 24
PART_ENTRIES = 8192  # this and the next two are those of plugins/cuda/sampling/parts.cuh
_ROW_BYTES, _PART_BYTES, _HEADER_BYTES = 10432, 144, 64
MAX_STAGE_BLOCKS = 528  # of the later stages, whose blocks process parts until there are none left
ROW_REFUSED = 3  # a row_status: a count, slot or draft would have indexed memory wrongly, or edited_logits is missing


class Stages(enum.Enum):
    """The launches that rows of several blocks need. ONE: greedy rows, and seeded ones without filters. DRAWS: all rows
    without top_k and top_p. ALL: all rows."""

    ONE = ("scan",)
    DRAWS = ("scan", "weigh", "draw")
    ALL = ("scan", "weigh", "rank", "draw", "whole")


def stages_of(sampling: SamplingArray) -> Stages:
    """Return the launches that accept() needs for these entries."""
    is_random = sampling["mode"] != native.GREEDY
    if (is_random & ((sampling["top_k"] > 0) | (sampling["top_p"] < 1))).any():
        return Stages.ALL
    draws = (sampling["mode"] == native.SAMPLED) | (is_random & (sampling["min_p"] > 0))
    return Stages.DRAWS if draws.any() else Stages.ONE


def workspace_bytes(num_rows: int, vocab_size: int, part_entries: int = PART_ENTRIES) -> int:
    """Return the size of the workspace in bytes; 0 where one block processes a row.

    The workspace must be zero before its first launch, and is for one vocabulary size.
    """
    num_parts = -(-vocab_size // part_entries)
    return _HEADER_BYTES + num_rows * (_ROW_BYTES + num_parts * _PART_BYTES) if num_parts > 1 else 0


def workspace_pointer(workspace: Any, num_rows: int, vocab_size: int, part_entries: int) -> Pointer:
    """Return a pointer to the workspace; raise InvalidArgumentError if there is none or it is too small."""
    num_bytes = workspace_bytes(num_rows, vocab_size, part_entries)
    found = pointer("workspace", workspace, "uint8", (None,))
    if workspace is None or workspace.shape[0] < num_bytes:
        have = 0 if workspace is None else workspace.shape[0]
        raise InvalidArgumentError(
            f"workspace has {have} bytes, {num_rows} rows of {vocab_size} tokens need {num_bytes} (workspace_bytes)"
        )
    return found


def launch_stages(
    launcher: Launcher,
    names: tuple[str, ...],
    num_rows: int,
    vocab_size: int,
    part_entries: int,
    arguments: tuple[Argument, ...],
) -> None:
    """Launch stages by the names of their kernels; the first one runs over all rows."""
    num_parts, packed = -(-vocab_size // part_entries), PackedArguments(arguments)
    grid = (num_parts, num_rows, 1)
    for name in names:
        launcher.launch(name, grid, (NUM_ROW_THREADS, 1, 1), packed)
        grid = (min(num_parts * num_rows, MAX_STAGE_BLOCKS), 1, 1)


def accept(
    launcher: Launcher,
    sampling: Any,
    slots: Any,
    logits: Any,
    vocab_size: int,
    cu_logit_rows: Any,
    num_tokens: Any,
    num_drafts: Any,
    max_draft_len: int,
    result: AcceptResult,
    verdicts: Any,
    edited_logits: Any | None = None,
    workspace: Any | None = None,
    stages: Stages = Stages.ALL,
    part_entries: int = PART_ENTRIES,
) -> None:
    """Run ops.accept on device tensors, into the tensors of `result`; asynchronous.

    sampling uint8 [num_slots, 160]: entries of SAMPLING_DTYPE whose pointers are the device's. slots, num_tokens,
    num_drafts int32 [num_requests], cu_logit_rows int32 [num_requests + 1]. logits [num_rows, >= vocab_size] fp32, bf16
    or fp16 with contiguous rows; rows beyond cu_logit_rows are ignored. Scratch: verdicts int32 [num_rows, 3];
    edited_logits fp32 [num_rows, vocab_size], needed if a slot has penalties, bias, bad words or min_tokens; workspace
    uint8 [workspace_bytes() of at least num_rows], needed if vocab_size is above part_entries (which tests change).
    stages: at least stages_of() the entries. Where ops.accept raises, the request ends with outcome FAILED and
    row_status ROW_REFUSED (3) instead, and keeps its tokens before that row. Tokens beyond num_tokens are 0.
    """
    dtype = type_name("logits", logits, "fp32", "bf16", "fp16")
    if not 1 <= vocab_size <= min(MAX_VOCAB_SIZE, logits.shape[1]):
        raise InvalidArgumentError(
            f"vocab_size is {vocab_size}; it must be 1 to {min(MAX_VOCAB_SIZE, logits.shape[1])}, the columns of logits"
        )
    if max_draft_len < 0:
        raise InvalidArgumentError(f"max_draft_len is {max_draft_len}; it must be at least 0")
    num_rows, num_requests = logits.shape[0], slots.shape[0]
    if logits.shape[0] and logits.stride(1) != 1:
        raise InvalidArgumentError(f"logits has strides {tuple(logits.stride())}, its rows must be contiguous")
    num_slots = sampling.shape[0]
    entry = pointer("sampling", sampling, "uint8", (None, SAMPLING_DTYPE.itemsize))
    inputs = (
        pointer("slots", slots, "int32", (None,)),
        pointer("cu_logit_rows", cu_logit_rows, "int32", (num_requests + 1,)),
        pointer("num_tokens", num_tokens, "int32", (num_requests,)),
        pointer("num_drafts", num_drafts, "int32", (num_requests,)),
    )
    slots_at, cu_rows_at, num_tokens_at, num_drafts_at = inputs
    verdicts_at = pointer("verdicts", verdicts, "int32", (num_rows, 3))
    edited_at = pointer("edited_logits", edited_logits, "fp32", (num_rows, vocab_size))
    outputs = (
        pointer("token_ids", result.token_ids, "int32", (num_requests, max_draft_len + 1)),
        pointer("num_tokens", result.num_tokens, "int32", (num_requests,)),
        pointer("num_accepted", result.num_accepted, "int32", (num_requests,)),
        pointer("outcome", result.outcome, "int32", (num_requests,)),
        pointer("row_status", result.row_status, "int32", (num_requests,)),
    )
    if not num_requests:
        return
    # The stride of a single row is undefined.
    stride = logits.stride(0) if num_rows > 1 else logits.shape[1]
    counts = (num_slots, num_requests, num_rows)
    if num_rows:
        rows = (
            *(entry, slots_at, ctypes.c_void_p(logits.data_ptr()), cu_rows_at, num_tokens_at, num_drafts_at),
            *map(ctypes.c_int32, (*counts, vocab_size, stride, max_draft_len)),
            edited_at,
        )
        if vocab_size <= part_entries:
            launcher.launch(f"accept_rows_{dtype}", (num_rows, 1, 1), (NUM_ROW_THREADS, 1, 1), (*rows, verdicts_at))
        else:
            names = tuple(f"accept_{stage}_{dtype}" for stage in stages.value)
            workspace_at = workspace_pointer(workspace, num_rows, vocab_size, part_entries)
            launch_stages(launcher, names, num_rows, vocab_size, part_entries, (*rows, workspace_at, verdicts_at))
    arguments = (entry, *inputs, verdicts_at, *map(ctypes.c_int32, (*counts, max_draft_len)), *outputs)
    num_blocks = -(-num_requests // NUM_REQUEST_THREADS)
    launcher.launch("accept", (num_blocks, 1, 1), (NUM_REQUEST_THREADS, 1, 1), arguments)
