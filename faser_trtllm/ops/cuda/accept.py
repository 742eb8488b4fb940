"""Rejection sampling on the device: two launches, one block per row of logits and one thread per request.

A row is read from memory once, then from cache: one pass for greedy, 2 or 3 for plain sampling, 4 for seeded, and up to
6 more for top_k and top_p, which need no sort (many equal logits at the cut cost extra). All features of ops.accept are
supported; penalties, bias, bad words and min_tokens need `edited_logits`. All sums are over integers, so results do not
depend on the number of threads. docs/gpu_kernels.md has times on an H100.
"""

from __future__ import annotations

import ctypes
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.accept import AcceptResult, accept_reference
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer, type_name

__all__ = ["MAX_VOCAB_SIZE", "ROW_REFUSED", "STEM", "accept", "accept_reference"]

STEM = "accept"
NUM_ROW_THREADS = 512
NUM_REQUEST_THREADS = 128
MAX_VOCAB_SIZE = 1 << 24
ROW_REFUSED = 3  # a row_status: counts, a slot or a draft that would have indexed memory wrongly, or no edited_logits


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
) -> None:
    """ops.accept on device tensors, written to the tensors of `result`.

    sampling uint8 [num_slots, 160]: entries of SAMPLING_DTYPE whose pointers are the device's. slots, num_tokens,
    num_drafts int32 [num_requests], cu_logit_rows int32 [num_requests + 1]. logits [num_rows, >= vocab_size] fp32, bf16
    or fp16 with contiguous rows; rows beyond cu_logit_rows are ignored. Scratch: verdicts int32
    [num_rows, 3]; edited_logits fp32 [num_rows, vocab_size], needed where a slot has penalties, bias, bad words or
    min_tokens. Where ops.accept raises, here the request ends with outcome FAILED and row_status
    ROW_REFUSED (3); its tokens before that row are kept. Tokens beyond a request's num_tokens are 0.
    Asynchronous.
    """
    dtype = type_name("logits", logits, "fp32", "bf16", "fp16")
    if not 1 <= vocab_size <= min(MAX_VOCAB_SIZE, logits.shape[1]):
        raise InvalidArgumentError(
            f"vocab_size is {vocab_size}, it must be 1 to {min(MAX_VOCAB_SIZE, logits.shape[1])}, the columns of logits"
        )
    if max_draft_len < 0:
        raise InvalidArgumentError(f"max_draft_len is {max_draft_len}, it must be at least 0")
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
        arguments = (
            *(entry, slots_at, ctypes.c_void_p(logits.data_ptr()), cu_rows_at, num_tokens_at, num_drafts_at),
            *map(ctypes.c_int32, (*counts, vocab_size, stride, max_draft_len)),
            *(edited_at, verdicts_at),
        )
        launcher.launch(f"accept_rows_{dtype}", (num_rows, 1, 1), (NUM_ROW_THREADS, 1, 1), arguments)
    arguments = (entry, *inputs, verdicts_at, *map(ctypes.c_int32, (*counts, max_draft_len)), *outputs)
    num_blocks = -(-num_requests // NUM_REQUEST_THREADS)
    launcher.launch("accept", (num_blocks, 1, 1), (NUM_REQUEST_THREADS, 1, 1), arguments)
