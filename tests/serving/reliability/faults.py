"""Cases 34 to 72 of what a service must answer for: faults. reliability_cases.py says what the values are."""

_EXECUTOR = "tests/executor/test_executor.py"
_GUARD = "tests/executor/test_guard.py"
_BUILD = "tests/builder/test_build.py"
_FILE = "tests/builder/test_engine_file.py"
_HEALTH = "tests/serving/engine_process/test_health.py"
_TRITON = "tests/serving/triton/test_triton.py"
_PROCESSES = "tests/serving/triton/test_faults.py"
_FAULTY = "tests/serving/reliability/test_faulty.py"
_SERVER = "tests/serving/reliability/test_server.py"
_START = "tests/serving/reliability/test_start.py"

FAULTS: dict[int, tuple[str, ...] | str] = {
    # an HTTP client disconnects in mid-stream
    34: (
        f"{_SERVER}::test_an_http_client_that_hangs_up_ends_its_requests",
        f"{_EXECUTOR}::test_cancel_is_heard_within_a_step_and_frees_the_slot",
        "tests/serving/openai/test_server.py::test_a_client_that_leaves_cancels_its_requests",
    ),
    # cancelled over gRPC, or past its deadline
    35: (
        f"{_SERVER}::test_a_deadline_of_grpc_ends_the_request",
        f"{_SERVER}::test_clients_that_all_vanish_leave_nothing_running",
    ),
    # 1000 cancelled at once
    36: (f"{_TRITON}::test_a_thousand_cancelled_streams_give_every_block_back",),
    # cancelled through ensemble or BLS: ours are models of their own, so it works
    37: ("tests/serving/triton/test_contract_server.py::test_cancelling_ends_the_request_in_the_engine",),
    # a client that does not read: Triton gives no sign of it, so nobody can be told "client too slow"; what waits is
    # bounded by the request's own output, and our OpenAI door holds the model up
    38: (
        f"{_SERVER}::test_clients_that_do_not_read_hold_up_nobody_and_what_waits_for_them_is_bounded",
        "tests/serving/engine_process/test_connection.py::test_what_came_while_the_socket_was_busy_goes_out_as_one_frame",
        "tests/serving/openai/test_app.py::test_a_client_that_does_not_read_holds_up_the_model",
    ),
    # a full queue; Retry-After over our OpenAI door, Triton has no header for it
    39: (
        f"{_FAULTY}::test_a_full_queue_is_unavailable_and_the_rest_is_served",
        f"{_EXECUTOR}::test_ten_thousand_requests_at_once_are_queued_or_refused",
        "tests/serving/openai/test_app.py::test_what_fails_before_the_first_token_has_its_status",
    ),
    # a deadline in the queue
    40: (
        f"{_TRITON}::test_a_deadline_in_the_queue_is_a_sentence",
        "tests/scheduler/test_rules.py::test_deadlines_end_waiting_and_running_requests",
    ),
    # the KV cache is full; a request larger than all of it
    41: (
        f"{_FAULTY}::test_more_than_the_cache_holds_is_preempted_or_waits_and_all_of_it_ends",
        "tests/scheduler/test_rules.py::test_a_request_that_the_cache_can_never_hold_is_refused_with_both_numbers",
    ),
    # the draft fails, runs out of memory, is late; one that never returns is a hang (60)
    42: (
        f"{_GUARD}::test_a_failing_draft_changes_no_token",
        f"{_GUARD}::test_speculation_comes_back_after_its_rest",
        f"{_GUARD}::test_a_slow_draft_is_a_timeout_but_not_while_it_reads_prompts",
        f"{_FAULTY}::test_a_failing_draft_costs_speed_only_and_is_counted_by_reason",
        f"{_FAULTY}::test_running_out_of_memory_is_a_reason_of_its_own",
    ),
    # NaN or infinite logits of the target or the draft
    43: (
        f"{_FAULTY}::test_nan_of_the_target_is_internal_for_that_request_only",
        f"{_EXECUTOR}::test_nan_of_the_target_fails_that_request_only",
        f"{_EXECUTOR}::test_nan_of_the_draft_costs_drafts_but_not_the_text",
        f"{_GUARD}::test_a_failing_draft_changes_no_token",
        "tests/ops/test_accept.py::test_a_draft_whose_distribution_is_nan_is_rejected_and_the_target_draws",
    ),
    # no draft accepted in 1000 steps
    44: (
        f"{_GUARD}::test_a_draft_that_is_never_right_is_switched_off",
        f"{_GUARD}::test_one_accepted_draft_begins_the_count_anew",
    ),
    # an engine file that is cut, empty, or something else
    45: (
        f"{_START}::test_an_engine_file_that_was_cut_is_refused_before_a_server_is_started",
        f"{_START}::test_an_engine_file_with_the_wrong_beginning_is_refused",
        f"{_FILE}::test_every_cut_is_noticed",
        f"{_FILE}::test_other_files_are_refused",
        "tests/builder/test_plan_file.py::test_every_cut_is_noticed",
    ),
    # an engine for another GPU or TensorRT; on a stand-in of TensorRT, no GPU
    46: (
        "tests/engine/tensorrt/test_engine.py::test_engines_for_something_else_are_refused",
        "tests/engine/tensorrt/test_engine.py::test_a_portable_engine_is_for_the_runtime_to_refuse",
        "tests/engine/cuda/test_executor.py::test_without_a_gpu_a_cuda_directory_is_refused_in_one_sentence",
    ),
    # a hash that is not the manifest's, and the override
    47: (
        f"{_START}::test_a_hash_that_is_not_the_manifest_s_is_refused_by_faser_check_and_faser_serve",
        f"{_START}::test_files_of_another_size_are_refused_whatever_hashes_are_allowed",
        f"{_START}::test_another_hash_is_served_with_a_warning_where_it_is_allowed",
        f"{_BUILD}::test_what_changed_is_built_again",
        "tests/test_cli.py::test_check_names_damage",
    ),
    # draft and target with other vocabularies
    48: (
        f"{_BUILD}::test_target_and_draft_must_speak_of_the_same_tokens",
        f"{_BUILD}::test_a_draft_padded_otherwise_is_brought_to_the_targets_vocab_size",
        "tests/models/test_tokenizer.py::test_the_first_difference_is_named",
    ),
    # no tokenizer; no chat template is refused where a chat asks for it
    49: (
        f"{_START}::test_a_directory_without_its_tokenizer_is_refused",
        f"{_PROCESSES}::test_an_engine_that_cannot_be_opened_is_told_in_a_sentence",
        "tests/models/test_tokenizer.py::test_unusable_tokenizers",
        "tests/serving/openai/test_request.py::test_without_a_tokenizer_there_is_no_chat_and_no_logprobs",
    ),
    # a directory that cannot be read: no right to, links in a circle, a network file system that went away
    50: (f"{_START}::test_directories_that_cannot_be_read_say_why",),
    # an unknown key in the configuration
    51: (f"{_START}::test_an_unknown_key_of_the_configuration_gets_a_suggestion",),
    # names that lead elsewhere: of models; requests name no other paths, LoRA is refused by name
    52: (
        f"{_SERVER}::test_a_model_name_that_leads_elsewhere_is_refused",
        f"{_SERVER}::test_the_same_over_grpc",
        f"{_START}::test_a_model_name_that_leads_out_of_the_repository_is_refused",
    ),
    # a port in use
    53: (f"{_PROCESSES}::test_port_in_use_is_named",),
    # the disk is full while building
    54: (
        f"{_BUILD}::test_a_full_disk_keeps_the_old_engines",
        f"{_BUILD}::test_too_little_space_is_noticed_before_writing",
    ),
    # kill -9 of a build
    55: (f"{_BUILD}::test_a_killed_build_is_never_accepted",),
    # kill -9 of the engine under streams
    56: (
        f"{_PROCESSES}::test_kill_of_the_engine_ends_every_stream_and_the_service_comes_back",
        f"{_TRITON}::test_kill_of_the_engine_under_streams",
        "tests/serving/engine_process/test_server.py::test_a_killed_engine_ends_the_streams_of_all_models_and_comes_back",
        f"{_HEALTH}::test_a_request_that_kills_the_engine_again_and_again_does_not_end_the_service",
    ),
    57: "models have no processes of their own; that of the engine is 56",
    # kill -9 of the engine while it loads
    58: (f"{_START}::test_an_engine_that_is_killed_while_it_starts_ends_the_start",),
    # kill -9 of tritonserver, or of the launcher
    59: (
        f"{_PROCESSES}::test_kill_of_tritonserver_leaves_nothing",
        f"{_PROCESSES}::test_kill_of_the_launcher_ends_the_server_and_the_next_launch_cleans_up",
        "tests/serving/launch/test_run_dir.py::test_only_the_dead_are_cleaned_up",
    ),
    # an engine that is stopped, or hangs; a server that hangs; a machine that is paused
    60: (
        f"{_SERVER}::test_a_stopped_engine_is_not_ready_within_5_s_and_recovers",
        f"{_HEALTH}::test_an_executor_that_hangs_is_seen_though_its_process_answers_and_is_started_again",
        f"{_HEALTH}::test_a_step_is_judged_by_the_steps_before_it",
        f"{_HEALTH}::test_an_engine_that_does_not_come_up_again_is_started_once_more",
        "tests/serving/launch/test_hang.py::test_a_server_that_hangs_is_killed_and_started_again",
        f"{_HEALTH}::test_a_pause_of_the_machine_ends_no_stream",
    ),
    # SIGTERM under streams, or while engine files are hashed
    61: (
        f"{_PROCESSES}::test_sigterm_lets_short_streams_finish_and_tells_long_ones",
        "tests/serving/launch/test_hashes.py::test_the_first_sigterm_ends_the_hashing",
    ),
    # a second signal
    62: (f"{_PROCESSES}::test_a_second_signal_ends_it_at_once",),
    # unload under streams
    63: (f"{_SERVER}::test_an_unload_ends_its_streams_in_bounded_time_and_joins_its_threads",),
    # load and unload, again and again
    64: ("tests/serving/triton/test_load_unload.py::test_load_and_unload_again_and_again",),
    # load while loading; a broken model in the place of a good one
    65: (
        f"{_SERVER}::test_loads_at_the_same_time_leave_one_that_serves",
        f"{_SERVER}::test_a_broken_model_does_not_take_the_place_of_a_good_one",
    ),
    # the wall clock jumps by an hour, as a patched time.time()
    66: (
        f"{_HEALTH}::test_a_wall_clock_that_jumps_an_hour_to_and_fro_has_no_effect",
        f"{_START}::test_the_wall_clock_is_read_only_to_be_shown",
    ),
    # nothing can be written, few open files; a limit of threads ends the child's start as any failed start, and is not
    # tested, since the superuser of a test machine has none
    67: (
        "tests/serving/launch/test_run_dir.py::test_a_place_that_cannot_be_written_to_is_a_sentence",
        f"{_START}::test_too_few_open_files_are_a_sentence_at_the_start",
        f"{_START}::test_a_low_soft_limit_of_files_and_a_full_log_disk_do_not_matter",
        "tests/serving/engine_process/test_server.py::test_an_engine_process_that_ends_before_it_is_ready_is_told",
    ),
    68: "no GPU to lose here; what a lost one leads to, an engine process that dies or hangs, is 56 and 60",
    # the log's disk is full, standard output is closed
    69: (
        f"{_START}::test_a_low_soft_limit_of_files_and_a_full_log_disk_do_not_matter",
        f"{_START}::test_closed_output_does_not_end_the_service",
    ),
    # metrics read a hundred times a second
    70: ("tests/serving/observe/test_dashboard.py::test_scraping_a_hundred_times_a_second_changes_nothing",),
    71: "numpy 2 beside the wheel's server: nothing of Python runs in it, and all tests run on numpy 2",
    # fork of a process with threads
    72: (f"{_START}::test_no_process_is_forked_and_goes_on",),
}
