"""Draft tokens on the device: sample draws one per request, advance counts them and decides which requests continue.

Each is one launch; with a large vocabulary, sample is five, as in ops/cuda/accept.py. Tokens, distributions, margins
and candidates are those of lab/reference/sample.py, and drafting ends as in ops/draft_stop.py, up to the last bits of
two libraries' logarithms and exponentials.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.accept import MAX_VOCAB_SIZE, PART_ENTRIES, Stages, launch_stages, workspace_pointer
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer

if TYPE_CHECKING:
    from torch import Tensor

STEM = "sample"
NUM_ROW_THREADS = 512
NUM_ADVANCE_THREADS = 256


@dataclass(frozen=True, slots=True)
class Draws:
    """The memory that the steps of one draft call read and write, for at most n requests; int32 unless noted."""

    entries: Tensor  # uint8 [n, 160]: SAMPLING_DTYPE with the device's pointers; draft_probs is not used
    known: Tensor  # [n]: tokens so far, which is the position of the next one
    remaining: Tensor  # [n]: tokens still to draft, 0 once a request has stopped
    slots: Tensor  # [n]: rows of probs
    newest: Tensor  # [n]: the tokens that the last step drew
    step: Tensor  # [1]: the number of steps so far
    tokens: Tensor  # [max_draft_len, n], by step; -1 if a request drew nothing
    margins: Tensor  # fp32 [max_draft_len, n]
    candidates: Tensor  # [max_draft_len, n, NUM_CANDIDATES]
    probs: Tensor  # fp32 [slots, max_draft_len, vocab_size]: q of unseeded drafts, in row position % max_draft_len
    runners_up: Tensor | None = None  # like tokens: the second choices (core/request.py), -1: none; None: not kept
    workspace: Tensor | None = None  # see ops.cuda.accept.workspace_bytes(), for n rows


@dataclass(frozen=True, slots=True)
class StopTables:
    """DraftStop (core/decision.py) on the device, for at most n requests."""

    modes: Tensor  # int32 [n]
    tables: Tensor  # fp32 [4, modes, width]: slope, intercept, prior and spread
    row_price: Tensor  # fp32 [width]
    step_price: Tensor  # fp32 [n + 1]
    pending: Tensor  # int32 [n]: pending drafts so far
    survival: Tensor  # fp64 [n]: of these drafts
    num_going: Tensor  # int32 [1]: requests that continue


def sample(
    launcher: Launcher,
    draws: Draws,
    logits: Tensor,
    num_requests: int,
    edited_logits: Tensor | None = None,
    *,
    part_entries: int = PART_ENTRIES,
) -> None:
    """Draw a token for each of the first num_requests requests that has tokens remaining; writes this step of `draws`.

    logits fp32 [at least num_requests, vocab_size]. edited_logits: scratch of that shape, needed if an entry has
    penalties, bias, bad words or min_tokens; without it, such a request draws nothing. part_entries: see accept().
    Contiguous device tensors; asynchronous.
    """
    (max_draft_len, max_requests), vocab_size = draws.tokens.shape, draws.probs.shape[2]
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise InvalidArgumentError(f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB_SIZE}")
    for name, rows in (("logits", logits), ("edited_logits", edited_logits)):
        if rows is not None and rows.shape[0] < num_requests:
            raise InvalidArgumentError(f"{name} has {rows.shape[0]} rows; it must have {num_requests}")
    shape, rows_of_logits = (max_draft_len, max_requests), (None, vocab_size)
    arguments = (
        pointer("entries", draws.entries, "uint8", (max_requests, SAMPLING_DTYPE.itemsize)),
        pointer("logits", logits, "fp32", rows_of_logits),
        *(_int32(draws, name, max_requests) for name in ("known", "remaining", "slots")),
        _int32(draws, "step", 1),
        *map(ctypes.c_int32, (num_requests, max_requests, vocab_size, vocab_size, max_draft_len, draws.probs.shape[0])),
        pointer("edited_logits", edited_logits, "fp32", rows_of_logits),
        pointer("probs", draws.probs, "fp32", (None, max_draft_len, vocab_size)),
        pointer("tokens", draws.tokens, "int32", shape),
        pointer("margins", draws.margins, "fp32", shape),
        pointer("candidates", draws.candidates, "int32", (*shape, NUM_CANDIDATES)),
        pointer("runners_up", draws.runners_up, "int32", shape),
    )
    if vocab_size <= part_entries:
        launcher.launch("sample_rows", (num_requests, 1, 1), (NUM_ROW_THREADS, 1, 1), arguments)
        return
    workspace_at = workspace_pointer(draws.workspace, num_requests, vocab_size, part_entries)
    names = tuple(f"sample_{stage}" for stage in Stages.ALL.value)
    launch_stages(launcher, names, num_requests, vocab_size, part_entries, (*arguments, workspace_at))


def advance(
    launcher: Launcher, draws: Draws, stop: StopTables, num_requests: int, *, has_history: bool = False
) -> None:
    """Count the tokens that the step drew, end drafting where `stop` requires, and go to the next step of `draws`.

    has_history: drawn tokens are also appended to the tokens of their entries, which must have room for them.
    """
    (max_draft_len, max_requests), width = draws.tokens.shape, stop.row_price.shape[0]
    shape, num_modes = (max_draft_len, max_requests), stop.tables.shape[1]
    if num_modes != len((native.GREEDY, native.SEEDED, native.SAMPLED)):
        raise InvalidArgumentError(f"tables has {num_modes} modes; it must have 3: greedy, seeded and sampled")
    arguments = (
        pointer("entries", draws.entries, "uint8", (max_requests, SAMPLING_DTYPE.itemsize)),
        pointer("tokens", draws.tokens, "int32", shape),
        pointer("margins", draws.margins, "fp32", shape),
        pointer("modes", stop.modes, "int32", (max_requests,)),
        pointer("tables", stop.tables, "fp32", (4, num_modes, width)),
        pointer("row_price", stop.row_price, "fp32", (width,)),
        pointer("step_price", stop.step_price, "fp32", (max_requests + 1,)),
        *map(ctypes.c_int32, (num_requests, max_requests, max_draft_len, width, has_history)),
        *(_int32(draws, name, max_requests) for name in ("newest", "known", "remaining")),
        pointer("pending", stop.pending, "int32", (max_requests,)),
        pointer("survival", stop.survival, "fp64", (max_requests,)),
        _int32(draws, "step", 1),
        pointer("num_going", stop.num_going, "int32", (1,)),
    )
    launcher.launch("sample_advance", (1, 1, 1), (NUM_ADVANCE_THREADS, 1, 1), arguments)


def _int32(draws: Draws, name: str, size: int) -> ctypes.c_void_p:
    return pointer(name, getattr(draws, name), "int32", (size,))
