"""Bad inputs, by number: the tests that answer each, or in one sentence why there is none.

Test ids are without parameters. Numbers 34 to 72, faults, are in faults.py.
"""

from __future__ import annotations

_BAD = "tests/serving/triton/test_bad_inputs.py::"
_TRITON = "tests/serving/triton/test_triton.py::"
_PROCESS = "tests/serving/engine_process/test_process.py::"
_SERVED = _PROCESS + "test_good_requests_are_served_next_to_bad_ones_and_ids_need_not_differ"
_CONTRACT = "tests/serving/triton/test_contract_server.py::"
_TEXT = "tests/serving/text/test_service.py::"
_OPENAI = "tests/serving/openai/test_server.py::"

_TENSORS = _BAD + "test_tensors_that_cannot_be"
_VALUES = _BAD + "test_values_out_of_range"
_JSON = _BAD + "test_json_that_cannot_be"

INPUTS: dict[int, tuple[str, ...] | str] = {
    1: (_TENSORS,),  # wrong dtype
    2: (_TENSORS,),  # wrong shape
    3: (_TENSORS,),  # unknown input
    4: (_TENSORS,),  # duplicate input
    5: (
        _TENSORS,
        "tests/serving/triton/test_contract_table.py::test_missing_inputs_are_named",
    ),  # required missing
    6: (_VALUES, _TEXT + "test_bad_input_gets_one_sentence", _TEXT + "test_an_empty_text_with_bos_is_a_prompt"),
    7: (_VALUES,),  # prompt longer than max_seq_len
    8: (  # prompt and max_tokens together: clamped, finish_reason length
        _BAD + "test_a_prompt_and_a_limit_that_pass_the_sequence_end_with_length",
        _TRITON + "test_ids_in_ids_out_and_the_end_of_the_sequence",
    ),
    9: (_VALUES,),  # max_tokens 0 or negative
    10: (_VALUES, _BAD + "test_json_values_that_are_no_integer"),  # max_tokens 2^31 and what wraps to less
    11: (_VALUES, _BAD + "test_a_number_that_no_float32_holds"),  # temperature
    12: (_VALUES,),  # top_p
    13: (_VALUES, _BAD + "test_a_top_k_above_the_vocabulary_keeps_all_of_it"),
    14: (_VALUES,),  # penalties
    15: (_TRITON + "test_a_seed_gives_one_text_with_and_without_speculation",),  # seed above 2^63
    16: (_VALUES, _BAD + "test_more_drafts_than_the_engine_takes_are_clamped_and_the_answer_counts_them"),
    17: (_VALUES, _CONTRACT + "test_what_cannot_be_is_one_sentence"),  # beam_width
    18: (_TENSORS,),  # invalid UTF-8
    19: (_BAD + "test_unusual_text_comes_back_as_it_was_sent", _VALUES, _JSON),  # NUL, BOM, RTL; 1 MB; surrogates
    20: (_BAD + "test_special_tokens_in_text_are_text",),
    21: (_VALUES, _CONTRACT + "test_what_cannot_be_is_one_sentence"),  # token ids out of the vocabulary
    22: (_VALUES,),  # input_ids and text_input
    23: (_TENSORS, _CONTRACT + "test_what_cannot_be_is_one_sentence"),  # input_lengths
    24: (  # 100,000 stop words; empty ones; across chunks and accepted drafts
        _VALUES,
        _TRITON + "test_stop_words_end_the_text_before_them",
        _TEXT + "test_stop_word_across_chunks_is_not_output_and_is_never_shown",
        "tests/serving/text/test_stop_words.py::test_any_cut_finds_what_a_plain_search_finds",
    ),
    25: (_BAD + "test_bad_words_that_ban_every_token_still_give_an_answer",),
    26: (
        _BAD + "test_the_same_request_id_at_the_same_time_is_two_streams",
        _SERVED,
    ),
    27: (_BAD + "test_a_request_id_of_a_megabyte_is_refused", _SERVED),
    28: (  # a batch is served, each prompt as a sequence of its own, or refused whole
        _TENSORS,
        _CONTRACT + "test_end_to_end_client_with_a_batch",
        _CONTRACT + "test_one_bad_item_ends_a_batch_with_its_sentence",
    ),
    29: (_BAD + "test_models_and_versions_that_are_not_there",),
    30: (
        _BAD + "test_json_values_that_are_no_integer",
        _JSON,
        _OPENAI + "test_errors_are_openai_s_json_with_the_right_status",
    ),
    31: (_JSON, "tests/serving/triton/test_fuzz.py::test_raw_http"),
    32: (  # 413 comes from the proxy; without one the server lives
        "tests/serving/test_proxy.py::test_limits_and_control_over_grpc",
        _BAD + "test_a_body_of_64_mb_does_not_end_the_server",
    ),
    33: (_BAD + "test_generate_gives_one_answer_with_all_of_the_text",),
}
