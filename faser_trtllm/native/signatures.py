"""The functions of faser_cpu.h: name, result and arguments. Array addresses are integers or c_void_p."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p

from faser_trtllm.native.structures import FaserModel

SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
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
    "faser_engine_distinct_experts": (c_double, [c_void_p]),
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
    "faser_suffix_predict": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_int32]),
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
    "faser_verify_lengths": (
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
    "faser_log_odds": (c_int32, [c_void_p, c_double, c_int32, *[c_void_p] * 5]),
    "faser_exit_drafts": (c_int32, [c_int32, *[c_void_p] * 6]),
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
    "faser_pack_sampling": (
        c_int64,
        [
            c_int32,  # num_requests
            *[c_void_p] * 6,  # slots, sampling, num_tokens, num_drafts, num_rows, branch_tokens
            c_int32,  # num_branches
            c_int32,  # vocab_size
            c_uint64,  # base
            c_uint64,  # draft_probs
            c_uint64,  # probs_bytes
            c_void_p,  # out
            c_int64,  # capacity
            c_void_p,  # out_is_edited
        ],
    ),
    "faser_fill_inputs": (
        c_int32,
        [
            c_void_p,  # limits
            c_int32,  # num_requests
            c_int32,  # num_rows
            *[c_void_p] * 4,  # slots, cu_rows, token_ids, positions
            c_int32,  # num_logit_rows
            *[c_void_p] * 2,  # logit_rows, block_table
            c_int32,  # num_slots
            c_int32,  # num_columns
            c_void_p,  # branch_parents
            c_int32,  # num_branches
            *[c_void_p] * 2,  # out, starts
        ],
    ),
    "faser_store_drafts": (
        c_int32,
        [
            c_int32,  # num_requests
            *[c_void_p] * 3,  # slots, sampling, num_known
            c_int32,  # num_steps
            c_int32,  # stride
            *[c_void_p] * 5,  # tokens, margins, candidates, runners_up, out_num_new
        ],
    ),
    "faser_count_tests": (c_int32, [c_int32, *[c_void_p] * 5]),
    "faser_pending_survival": (c_int32, [c_void_p, c_int32, *[c_void_p] * 5]),
    "faser_draft_rows": (
        c_int32,
        [
            c_int32,  # num_requests
            *[c_void_p] * 6,  # slots, sampling, counts, num_pending, num_new_tokens, max_drafts
            c_int32,  # kind
            *[c_void_p] * 2,  # out, out_num_requests
            c_int32,  # max_num_rows
            *[c_void_p] * 5,  # cu_rows, token_ids, positions, logit_rows, out_num_logit_rows
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
            c_int32,  # num_sampled
            *[c_void_p] * 5,  # slots, counts, times_s, texts, bounds
            c_double,  # now_s
            *[c_void_p] * 4,  # num_rows, num_drafted, num_draft_computed, token_ids
            c_int32,  # stride
            *[c_void_p] * 8,  # num_new, num_accepted, outcome, num_pruned, out_num_new, out_end, out_due, out_tokens
        ],
    ),
    "faser_host_loop": (c_int64, [c_int32, c_int32, c_int32, c_uint64]),
}
