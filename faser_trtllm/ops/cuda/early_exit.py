"""Early exit on the device: score a few candidate tokens from the hidden rows between two segments.

The kernels read each candidate's LM head row once: num_rows * num_candidates * hidden_size weights bound the time.
"""

from __future__ import annotations

import ctypes
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import bits_of, pointer, type_name

STEM = "early_exit"
NUM_THREADS = 256
MAX_CANDIDATES = 32


def early_exit(
    launcher: Launcher,
    hidden: Any,
    rows: Any,
    final_norm: Any,
    lm_head: Any,
    candidates: Any,
    drafted_place: Any,
    rms_norm_eps: float,
    scores: Any,
    rank: Any,
    gap: Any,
) -> None:
    """Write scores of candidates, and rank and gap of the drafted one (lab/reference/cuda/early_exit.py defines them).

    hidden [num_hidden_rows, hidden_size], final_norm [hidden_size], lm_head [vocab_size, hidden_size]: torch.bfloat16
    or torch.float16, all of one dtype. rows int32 [num_rows]: rows of hidden. candidates int32 [num_rows,
    num_candidates], num_candidates 1 to 32, -1 for none; drafted_place int32 [num_rows]: the drafted token's place
    among them. scores fp32 [num_rows, num_candidates]; rank int32 [num_rows], gap fp32 [num_rows]. Contiguous device
    tensors; asynchronous.
    """
    dtype = type_name("hidden", hidden, "bf16", "fp16")
    num_rows, num_candidates = candidates.shape
    if not 1 <= num_candidates <= MAX_CANDIDATES:
        raise InvalidArgumentError(
            f"candidates has {num_candidates} per row; it must have 1 to {MAX_CANDIDATES}; pass fewer"
        )
    num_hidden_rows, hidden_size = hidden.shape
    vocab_size = lm_head.shape[0]
    arguments = (
        pointer("hidden", hidden, dtype, (None, None)),
        pointer("rows", rows, "int32", (num_rows,)),
        pointer("final_norm", final_norm, dtype, (hidden_size,)),
        pointer("lm_head", lm_head, dtype, (None, hidden_size)),
        pointer("candidates", candidates, "int32", (None, None)),
        pointer("drafted_place", drafted_place, "int32", (num_rows,)),
        *map(ctypes.c_int32, (num_rows, num_hidden_rows, hidden_size, vocab_size, num_candidates)),
        ctypes.c_int32(bits_of(rms_norm_eps)),
        pointer("scores", scores, "fp32", (num_rows, num_candidates)),
        pointer("rank", rank, "int32", (num_rows,)),
        pointer("gap", gap, "fp32", (num_rows,)),
    )
    if num_rows:
        launcher.launch(f"early_exit_{dtype}", (num_rows, 1, 1), (NUM_THREADS, 1, 1), arguments)
