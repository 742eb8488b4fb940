"""The native library (faser_cpu.h) through ctypes: loaded once, signatures and structures in one place."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from faser_trtllm.errors import FaserError, InvalidArgumentError, OutOfMemoryError

ABI_VERSION = 16

FASER_OK = 0
FASER_BAD_ARGUMENT = -1
FASER_OUT_OF_MEMORY = -2
FASER_BAD_TOKEN = -3
FASER_BAD_POSITION = -4
FASER_BAD_BLOCK = -5

ROW_OK = 0
ROW_NAN = 1
ROW_EMPTY = 2

CARRIED = 0
RECOVERED = 1
BONUS = 2
FAILED = 3

GREEDY = 0
SEEDED = 1
SAMPLED = 2

BY_MODEL = 0
BY_SUFFIX = 1
NUM_SOURCES = 2


class FaserLayer(Structure):
    """struct faser_layer: addresses of one layer's weights, None where the header allows NULL."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o", c_void_p),
        ("o_bias", c_void_p),
        ("post_norm", c_void_p),
        ("gate_up", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("qkv_scales", c_void_p),
        ("o_scales", c_void_p),
        ("gate_up_scales", c_void_p),
        ("down_scales", c_void_p),
    ]


class FaserHead(Structure):
    """struct faser_head: what an EAGLE-3 head or an MTP layer has beside a decoder's layer."""

    _fields_ = [
        ("fc", c_void_p),
        ("fc_bias", c_void_p),
        ("hidden_norm", c_void_p),
        ("target_ids", c_void_p),
        ("num_features", c_int32),
        ("draft_vocab_size", c_int32),
        ("norm_before_residual", c_int32),
        ("input_proj", c_void_p),
        ("token_norm", c_void_p),
        ("reads_normed", c_int32),
    ]


class FaserMedusa(Structure):
    """struct faser_medusa: Medusa heads, in the place of a decoder's layers."""

    _fields_ = [
        ("residual", c_void_p),
        ("residual_bias", c_void_p),
        ("num_heads", c_int32),
        ("num_layers", c_int32),
    ]


class FaserModel(Structure):
    """struct faser_model."""

    _fields_ = [
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("max_seq_len", c_int32),
        ("sliding_window", c_int32),
        ("rms_norm_eps", c_float),
        ("rope_attention_factor", c_float),
        ("rope_inv_freq", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", c_void_p),
        ("layers", POINTER(FaserLayer)),
        ("head", POINTER(FaserHead)),
        ("medusa", POINTER(FaserMedusa)),
        ("lm_head_scales", c_void_p),
        ("weight_bits", c_int32),
        ("group_size", c_int32),
        ("activation_bits", c_int32),
    ]


class FaserBatch(Structure):
    """struct faser_batch."""

    _fields_ = [
        ("num_requests", c_int32),
        ("num_rows", c_int32),
        ("max_blocks_per_seq", c_int32),
        ("slots", c_void_p),
        ("cu_rows", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("block_table", c_void_p),
        ("branch_parents", c_void_p),
        ("num_branches", c_int32),
    ]


class FaserSampling(Structure):
    """struct faser_sampling: one request's sampling parameters."""

    _fields_ = [
        ("tokens", c_void_p),
        ("draft_probs", c_void_p),
        ("draft_margins", c_void_p),
        ("draft_candidates", c_void_p),
        ("draft_sources", c_void_p),
        ("end_ids", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("bad_words", c_void_p),
        ("cu_bad_words", c_void_p),
        ("key", c_uint64),
        ("draft_counter", c_uint64),
        ("num_tested", c_int64 * NUM_SOURCES),
        ("num_passed", c_int64 * NUM_SOURCES),
        ("num_end_ids", c_int32),
        ("num_bias", c_int32),
        ("num_bad_words", c_int32),
        ("prompt_len", c_int32),
        ("min_tokens", c_int32),
        ("mode", c_int32),
        ("top_k", c_int32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("num_mask_rows", c_int32),
        ("masks", c_void_p),
        ("fill_masks", c_void_p),
        ("draft_runners_up", c_void_p),
    ]


FillMasks = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_int32), POINTER(c_int32))
"""faser_fill_masks: num_requests, slots, num_known."""


class FaserDraftStop(Structure):
    """struct faser_draft_stop: when drafting stops early."""

    _fields_ = [
        ("slope", c_void_p),
        ("intercept", c_void_p),
        ("prior", c_void_p),
        ("spread", c_void_p),
        ("row_price", c_void_p),
        ("step_price", c_void_p),
        ("stride", c_int32),
    ]


class FaserSlotCosts(Structure):
    """struct faser_slot_costs: what slots of a pass cost."""

    _fields_ = [
        ("verify_ms", c_void_p),
        ("draft_first_ms", c_void_p),
        ("draft_step_ms", c_void_p),
        ("fixed_ms", c_double),
        ("base_tokens", c_double),
        ("price", c_double),
        ("num_costs", c_int32),
        ("multiple", c_int32),
    ]


class FaserAcceptance(Structure):
    """struct faser_acceptance: how likely drafts are accepted."""

    _fields_ = [
        ("slope", c_void_p),
        ("intercept", c_void_p),
        ("max_margin", c_double),
        ("stride", c_int32),
    ]


class FaserTestSums(Structure):
    """struct faser_test_sums: sums over tested drafts."""

    _fields_ = [("cells", c_void_p), ("bins", c_void_p), ("num_bins", c_int32)]


class FaserTexts(Structure):
    """struct faser_texts: where a slot's tokens and end ids are."""

    _fields_ = [("tokens", c_void_p), ("end_ids", c_void_p), ("num_end_ids", c_int64)]


# name: (result, arguments); addresses of arrays are passed as integers or c_void_p.
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "faser_abi_version": (c_int32, []),
    "faser_isa": (c_char_p, []),
    "faser_pool_create": (c_void_p, [c_void_p, c_int32, c_int32]),
    "faser_pool_num_threads": (c_int32, [c_void_p]),
    "faser_pool_destroy": (None, [c_void_p]),
    "faser_engine_create": (
        c_void_p,
        [POINTER(FaserModel), c_void_p, c_int32, c_int32, c_int32, c_int32, POINTER(c_int32)],
    ),
    "faser_engine_destroy": (None, [c_void_p]),
    "faser_engine_memory_bytes": (c_int64, [c_void_p]),
    "faser_engine_logits_stride": (c_int32, [c_void_p]),
    "faser_engine_num_layers": (c_int32, [c_void_p]),
    "faser_engine_vocab_size": (c_int32, [c_void_p]),
    "faser_engine_forward": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p],
    ),
    "faser_engine_attach_head": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    "faser_engine_compact_rows": (c_int32, [c_void_p, c_void_p, c_int32]),
    "faser_engine_early_exit": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p],
    ),
    "faser_engine_copy_kv": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p]),
    "faser_engine_hidden_rows": (c_int32, [c_void_p, c_int32, c_void_p]),
    "faser_engine_set_pool": (c_int32, [c_void_p, c_void_p]),
    "faser_next_token_probs": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_void_p]),
    "faser_accept": (
        c_int32,
        [
            c_void_p,  # pool
            c_int32,  # num_requests
            c_void_p,  # slots
            c_void_p,  # sampling
            c_void_p,  # logits
            c_int32,  # logits_stride
            c_int32,  # vocab_size
            c_void_p,  # cu_logit_rows
            c_void_p,  # num_tokens
            c_void_p,  # num_drafts
            c_int32,  # max_draft_len
            c_void_p,  # out_tokens
            c_void_p,  # out_num_tokens
            c_void_p,  # out_num_accepted
            c_void_p,  # out_outcome
            c_void_p,  # out_row_status
        ],
    ),
    "faser_sample_draft": (
        c_int32,
        [
            c_void_p,  # pool
            c_int32,  # num_requests
            c_void_p,  # slots
            c_void_p,  # sampling
            c_void_p,  # logits
            c_int32,  # logits_stride
            c_int32,  # vocab_size
            c_void_p,  # num_known
            c_int32,  # max_draft_len
            c_void_p,  # out_tokens
        ],
    ),
    "faser_draft": (
        c_int32,
        [
            c_void_p,  # engine
            c_void_p,  # pool
            c_void_p,  # batch
            c_void_p,  # sampling
            c_void_p,  # num_tokens
            c_void_p,  # num_drafts
            c_void_p,  # num_new_drafts
            c_int32,  # max_draft_len
            c_void_p,  # stop
            c_void_p,  # logits
            c_void_p,  # out_num_new
        ],
    ),
    "faser_suffix_create": (c_void_p, [c_int32, c_int32, POINTER(c_int32)]),
    "faser_suffix_destroy": (None, [c_void_p]),
    "faser_suffix_memory_bytes": (c_int64, [c_void_p]),
    "faser_suffix_reset": (c_int32, [c_void_p, c_int32]),
    "faser_suffix_draft": (
        c_int32,
        [
            c_void_p,  # suffix
            c_int32,  # num_requests
            c_void_p,  # slots
            c_void_p,  # sampling
            c_void_p,  # num_tokens
            c_void_p,  # num_drafts
            c_void_p,  # num_new_drafts
            c_void_p,  # num_model
            c_void_p,  # out_num_new
        ],
    ),
    "faser_best_slots": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p]),
    "faser_frontier": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "faser_pick_branches": (
        c_int32,
        [
            c_int32,  # num_requests
            *[c_void_p] * 5,  # slots, sampling, num_tokens, num_pending, num_verified
            c_void_p,  # acceptance
            c_int32,  # trades
            c_double,  # min_worth
            c_int32,  # max_branches
            c_int32,  # max_num
            *[c_void_p] * 3,  # out_requests, out_places, out_tokens
        ],
    ),
    "faser_add_tests": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "faser_fill_rows": (
        c_int32,
        [
            c_int32,  # num_requests
            c_void_p,  # slots
            c_void_p,  # sampling
            c_void_p,  # first
            c_void_p,  # end
            c_void_p,  # num_logit_rows
            c_int32,  # max_num_rows
            c_void_p,  # cu_rows
            c_void_p,  # token_ids
            c_void_p,  # positions
            c_void_p,  # logit_rows
            c_void_p,  # out_num_logit_rows
        ],
    ),
    "faser_check_drafts": (
        c_int32,
        [
            c_int32,  # num_requests
            *[c_void_p] * 5,  # slots, sampling, first, num_new, room
            c_int32,  # vocab_size
        ],
    ),
    "faser_commit": (
        c_int32,
        [
            c_int32,  # num_requests
            *[c_void_p] * 5,  # slots, counts, times_s, texts, bounds
            c_double,  # now_s
            *[c_void_p] * 4,  # num_rows, num_drafted, num_draft_computed, token_ids
            c_int32,  # stride
            *[c_void_p] * 8,  # num_new, num_accepted, is_carried, num_pruned, out_num_new, out_end, out_due, out_tokens
        ],
    ),
    "faser_host_loop": (c_int64, [c_int32, c_int32, c_int32, c_uint64]),
}

_LIBRARY = Path(__file__).parent / "_native" / "libfaser_cpu.so"

_STATUS_SENTENCES = {
    FASER_BAD_ARGUMENT: "an argument is out of range",
    FASER_OUT_OF_MEMORY: "memory ran out",
    FASER_BAD_TOKEN: "a token id is outside the vocabulary",
    FASER_BAD_POSITION: "a position is outside the sequence length the engine was opened with",
    FASER_BAD_BLOCK: "a block id is outside the KV pool",
}


def address_of_buffer(buffer: Any) -> int:
    """The address of a numpy array's first element, four times as fast as numpy's own accessor.

    The fast path needs a writable, C-contiguous, non-empty array; others take the slow one.
    """
    try:
        return ctypes.addressof(c_char.from_buffer(buffer))
    except (TypeError, ValueError):
        address: int = buffer.__array_interface__["data"][0]
        return address


def address_of_function(function: Any) -> int:
    """The address of a FillMasks, for a structure's field; the function must be kept alive."""
    return ctypes.cast(function, c_void_p).value or 0


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with signatures declared; FaserError if it is missing or has another version."""
    if not _LIBRARY.exists():
        raise FaserError("native library not found, run ./build.sh setup")
    try:
        lib = ctypes.CDLL(str(_LIBRARY))
        lib.faser_abi_version.restype = c_int32
        version = lib.faser_abi_version()
    except (OSError, AttributeError) as error:
        raise FaserError(f"the native library cannot be loaded ({error}), run ./build.sh setup") from error
    if version != ABI_VERSION:
        raise FaserError(f"the native library has ABI version {version}, needed is {ABI_VERSION}; run ./build.sh setup")
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise FaserError(f"the native library lacks {name}, run ./build.sh setup") from error
        function.restype = result
        function.argtypes = arguments
    return lib


def isa() -> str:
    """The instruction set this process runs: amxbf16, avx512bf16, avx2 or portable."""
    name: bytes = library().faser_isa()
    return name.decode()


def check(status: int, what: str) -> None:
    """Raise for a negative faser_status: InvalidArgumentError, or OutOfMemoryError."""
    if status >= FASER_OK:
        return
    sentence = f"{what} failed: {_STATUS_SENTENCES.get(status, f'status {status}')}"
    raise (OutOfMemoryError if status == FASER_OUT_OF_MEMORY else InvalidArgumentError)(sentence)
