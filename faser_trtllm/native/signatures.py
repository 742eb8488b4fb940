"""The functions of faser_cpu.h: a code for the result, the name, and a code for each argument.

Every pointer is a c_void_p, which also takes an integer. tests/native/test_header.py compares table and header.
"""

from __future__ import annotations

from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p

_TYPES: dict[str, type | None] = {
    "p": c_void_p,
    "i": c_int32,
    "l": c_int64,
    "u": c_uint64,
    "d": c_double,
    "s": c_char_p,
    "v": None,
}
_FUNCTIONS = """
i faser_abi_version
s faser_isa
p faser_pool_create             pii
v faser_pool_destroy            p
p faser_engine_create           ppiiiip
v faser_engine_destroy          p
l faser_engine_memory_bytes     p
i faser_engine_logits_stride    p
d faser_engine_distinct_experts p
i faser_engine_forward          ppiipip
i faser_engine_attach_head      pppi
i faser_engine_compact_rows     ppi
i faser_engine_early_exit       ppipip
i faser_engine_copy_kv          pipppp
i faser_engine_hidden_rows      pip
i faser_engine_set_pool         pp
i faser_next_token_probs        ppiip
i faser_accept                  pipppiipppippppp
i faser_sample_draft            pipppiipip
i faser_draft                   pppppppippp
p faser_suffix_create           iip
v faser_suffix_destroy          p
l faser_suffix_memory_bytes     p
i faser_suffix_reset            pi
i faser_suffix_predict          pipii
i faser_suffix_draft            pippppppp
i faser_best_slots              piipppp
i faser_verify_lengths          ppippppp
i faser_pick_branches           ippppppidiippp
i faser_add_tests               ppippppp
i faser_log_odds                pdippppp
i faser_exit_drafts             ipppppp
i faser_fill_rows               ipppppippppp
l faser_pack_sampling           ippppppiiuuuplp
i faser_fill_inputs             piippppippiipipp
i faser_store_drafts            ipppiippppp
i faser_count_tests             ippppp
i faser_pending_survival        pippppp
i faser_draft_rows              ippppppippippppp
i faser_check_drafts            ipppppi
i faser_commit                  iipppppdppppipppppppp
l faser_host_loop               iiiu
"""
_ROWS = ((*line.split(), "")[:3] for line in _FUNCTIONS.split("\n") if line)
SIGNATURES = {name: (_TYPES[result], [_TYPES[code] for code in arguments]) for result, name, arguments in _ROWS}
"""(result type, argument types) by function name."""
