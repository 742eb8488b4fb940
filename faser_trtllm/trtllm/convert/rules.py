"""The keys of TensorRT-LLM's configurations (LLM API of 1.2 to 1.4, build_config, config.json), and their rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from faser_trtllm.trtllm.convert.kv_cache import EXPERTS, KV_CACHE, MEMORY, METRICS
from faser_trtllm.trtllm.convert.speculation import judge_decoding_mode, judge_speculation
from faser_trtllm.trtllm.convert.synthetic import FORCED_ACCEPTANCE, parse_forced
from faser_trtllm.trtllm.convert.verdict import (
    BOOLEAN,
    TEXT,
    Outcome,
    Rule,
    Rules,
    Section,
    Verdict,
    became,
    ignored,
    join,
    one_of,
    only,
    refusal,
    refused,
    show,
    whole,
)

_ONE_DEVICE = "one device runs a model here; leave it at 1 and start a replica per device"
_RANKS = "the GPUs of a model are counted by faser build --backend cuda --tp_size; leave it out here"
_HERE = ignored("files are read from this machine")
_NO_ENCODER = ignored("decoder-only models have no encoder")
_OWN_SAMPLING = ignored("sampling is our own")
_WEIGHTS = refused("weights are read from the checkpoint; leave it out")
_SERVERS = refused("it is for several servers, and prompt and generation run in one process here; leave it out")
_ALONE = ignored("one device runs a model here, so there is nothing to divide")
_WAITING = ignored("requests join at the next step, without waiting for a fuller batch")
_TUNING = ignored("it tunes TensorRT-LLM's own kernels")
_NO_LORA = "LoRA is not supported; merge the weights into the checkpoint"
_LORA = refused(_NO_LORA)
_BEAMS = only(1, otherwise="beam search is not supported; send n requests with different seeds, or keep beam width 1")
_ONLY_FP8 = (
    "only FP8 is converted; a checkpoint that is quantized already (fp8, AWQ, GPTQ) is read as it is: leave it out"
)


def _dtype(key: str, value: Any) -> Verdict:
    if value == "auto":
        return Verdict(key, value, Outcome.IGNORED, "faser build takes bfloat16")
    return became(one_of("bfloat16", "float16", "float32"), build="dtype")(key, value)


def _most_drafts(key: str, value: Any) -> Verdict:
    if type(value) is int and value == 0:
        return Verdict(key, value, Outcome.IGNORED, "0 is trtllm-build's default; the draft checkpoint decides here")
    note = "an upper bound: the policy chooses each request's length"
    return became(whole(0), build="max_draft_len", note=note)(key, value)


def _quantization(key: str, section: Mapping[Any, Any]) -> Iterable[Verdict]:
    """Judge quantization settings, which have no effect unless they name an algorithm."""
    for name, value in section.items():
        path = join(key, name)
        if value is None or "quant_algo" not in str(name):
            yield Verdict(path, value, Outcome.IGNORED, "it does not ask for quantization")
        elif value != "FP8":
            yield refusal(path, value, f"{path} is {show(value)}; {_ONLY_FP8}")
        elif name == "quant_algo":
            note = "for the TensorRT backends; cuda engines take quantization: fp8 in faser.yaml"
            yield Verdict(path, value, Outcome.BECAME, note, build={"quantization": "FP8"})
        else:
            yield Verdict(path, value, Outcome.BECAME, "on cuda engines", {"kv_cache_config.dtype": "fp8"})


def _environment(key: str, section: Mapping[Any, Any]) -> Iterable[Verdict]:
    for name, value in section.items():
        path = join(key, name)
        if name != FORCED_ACCEPTANCE:
            yield Verdict(path, value, Outcome.IGNORED, "it is a variable of TensorRT-LLM's processes")
            continue
        forced = parse_forced(value)
        if forced == 0:
            yield Verdict(path, value, Outcome.IGNORED, "0 is off")
        elif forced is not None:
            note = "outputs are then not the target's"
            yield Verdict(path, value, Outcome.BECAME, note, {"synthetic_acceptance": forced})
        else:
            yield refusal(path, value, f"{path} is {show(value)}; it must be a number of at least 0")


def _lora_config(key: str, section: Mapping[Any, Any]) -> Iterable[Verdict]:
    """Judge lora_config, which every engine's config.json has and which matters only if it names weights."""
    for name, value in section.items():
        rule = _LORA if name == "lora_dir" else ignored("it concerns LoRA, which is not requested without lora_dir")
        yield rule(join(key, name), value)


PLUGINS: Mapping[str, Rule] = {
    "tokens_per_block": became(whole(1), build="tokens_per_block"),
    "lora_plugin": only("disable", False, otherwise=_NO_LORA),
    "dora_plugin": only("disable", False, otherwise=_NO_LORA),
    "remove_input_padding": only(True, "enable", otherwise="rows are never padded here; leave it enabled"),
    "paged_kv_cache": only(True, "enable", otherwise="the KV cache is paged; leave it enabled"),
    "streamingllm": only(False, "disable", otherwise="StreamingLLM is not supported; leave it disabled"),
}
"""Entries of plugin_config that do more than choose kernels; names of other entries differ between releases."""


def judge_plugin(key: str, value: Any) -> Verdict:
    """Judge one plugin; key is plain or dotted, and its last part names the plugin."""
    rule = PLUGINS.get(key.rpartition(".")[2].removeprefix("--"), ignored("faser build's backend chooses its kernels"))
    return rule(key, value)


def _plugins(key: str, section: Mapping[Any, Any]) -> Iterable[Verdict]:
    for name, value in section.items():
        path = join(key, name)
        yield Verdict(path, None, Outcome.IGNORED, "it is not set") if value is None else judge_plugin(path, value)


def _pretrained(key: str, section: Mapping[Any, Any]) -> Iterable[Verdict]:
    """Judge pretrained_config, which describes a converted checkpoint; we read Hugging Face's format."""
    for name, value in section.items():
        path = join(key, name)
        if name == "quantization" and isinstance(value, Mapping):
            yield from _quantization(path, value)
        elif name == "mapping" and isinstance(value, Mapping):
            sizes = {part: size for part, size in value.items() if str(part).endswith("_size")}
            for part, size in sizes.items():
                otherwise = _RANKS if part in ("tp_size", "world_size") else _ONE_DEVICE
                yield only(1, -1, otherwise=otherwise)(join(path, part), size)
            if not sizes:
                yield Verdict(path, value, Outcome.IGNORED, "that is the behavior here")
        else:
            yield Verdict(path, value, Outcome.IGNORED, "it is read from the checkpoint")


def _context_chunking(key: str, value: Any) -> Verdict:
    verdict = became(
        one_of("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"), serve="scheduler_config.context_chunking_policy"
    )(key, value)
    if value != "EQUAL_PROGRESS":
        return verdict
    note = "only TensorRT-LLM's own scheduler supports it, which needs the package tensorrt_llm"
    return replace(verdict, reason=note, serve={**verdict.serve, "scheduler": "trtllm"})


SCHEDULER: Rules = {
    "capacity_scheduler_policy": became(
        one_of("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"), serve="scheduler_config.capacity_scheduler_policy"
    ),
    "context_chunking_policy": _context_chunking,
    "dynamic_batch_config": ignored("the batch changes in every step anyway"),
    "waiting_queue_policy": only(
        "fcfs", otherwise="the queue is first come, first served within a priority; leave it at fcfs"
    ),
    "enable_prefix_aware_scheduling": ignored("the order is by priority, then by arrival"),
    "use_python_scheduler": ignored("scheduling is our own, or that of scheduler: trtllm"),
}

BUILD: Rules = {
    "max_input_len": ignored("max_seq_len bounds prompt and output together"),
    "max_seq_len": became(whole(2), serve="max_seq_len", build="max_seq_len"),
    "opt_batch_size": ignored("the backend of faser build chooses its buckets"),
    "max_batch_size": became(whole(1), serve="max_batch_size", build="max_batch_size"),
    "max_beam_width": _BEAMS,
    "max_num_tokens": became(whole(1), serve="max_num_tokens", build="max_num_tokens"),
    "opt_num_tokens": ignored("the backend of faser build chooses its buckets"),
    "max_prompt_embedding_table_size": only(0, otherwise="prompt tables are not supported; leave it at 0"),
    "max_encoder_input_len": _NO_ENCODER,
    "kv_cache_type": only("paged", "kvcachetype.paged", otherwise="the KV cache is paged; leave it out"),
    "gather_context_logits": only(False, otherwise="prompt tokens found in the KV cache have no logits; leave it out"),
    "gather_generation_logits": ignored("requests ask for them (return_generation_logits)"),
    "strongly_typed": ignored("engines have one type throughout"),
    "force_num_profiles": ignored("the backend of faser build chooses its buckets"),
    "profiling_verbosity": ignored("faser check explains an engine"),
    "enable_debug_output": only(False, otherwise="engines have no debug outputs; leave it out"),
    "max_draft_len": _most_drafts,
    "speculative_decoding_mode": judge_decoding_mode,
    "use_refit": only(False, otherwise="weights are built in; leave it out"),
    "use_strip_plan": only(False, otherwise="weights are built in; leave it out"),
    "strip_plan": only(False, otherwise="weights are built in; leave it out"),
    "input_timing_cache": ignored("faser build keeps no timing cache"),
    "output_timing_cache": ignored("faser build keeps no timing cache"),
    "lora_config": Section(_lora_config),
    "auto_parallel_config": ignored("one device runs a model here"),
    "weight_sparsity": only(False, otherwise="sparse weights are not used; leave it out"),
    "weight_streaming": only(False, otherwise="weights stay on the device; leave it out"),
    "plugin_config": Section(_plugins),
    "use_mrope": only(False, otherwise="multimodal models are not served; leave it out"),
    "dry_run": ignored("faser build has --dry_run"),
    "visualize_network": ignored("faser check explains an engine"),
    "monitor_memory": ignored("faser build checks memory and disk beforehand"),
}

LLM_API: Rules = {
    "model": became(TEXT, build="checkpoint_dir"),
    "tokenizer": became(TEXT, build="tokenizer", note="it must be the target checkpoint's own"),
    "tokenizer_mode": only("auto", otherwise="only tokenizer.json is read; leave it out"),
    "custom_tokenizer": refused("only tokenizer.json is read; leave it out"),
    "skip_tokenizer_init": ignored("the model tensorrt_llm works on token ids, the others on text"),
    "trust_remote_code": ignored("code of a checkpoint is never run"),
    "revision": _HERE,
    "tokenizer_revision": _HERE,
    "dtype": _dtype,
    "model_kwargs": refused("a checkpoint's config.json is taken as it is; change it there"),
    "tensor_parallel_size": only(1, otherwise=_RANKS),
    **dict.fromkeys(("pipeline_parallel_size", "context_parallel_size"), only(1, otherwise=_ONE_DEVICE)),
    **dict.fromkeys(
        ("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"),
        only(1, -1, otherwise=_ONE_DEVICE),
    ),
    "gpus_per_node": ignored("all GPUs of a model are in one machine"),
    **dict.fromkeys(("enable_attention_dp", "enable_lm_head_tp_in_adp", "attention_dp_config"), _ALONE),
    "pp_partition": refused(_ONE_DEVICE),
    "cp_config": refused(_ONE_DEVICE),
    "load_format": only("auto", "0", otherwise="weights are read from the checkpoint; leave it out"),
    "checkpoint_format": only("HF", otherwise="checkpoints are in Hugging Face's format; leave it out"),
    "checkpoint_loader": refused("checkpoints are in Hugging Face's format; leave it out"),
    "checkpoint_io_policy": ignored("weights are read by faser build"),
    "gms_config": _WEIGHTS,
    "mx_config": _WEIGHTS,
    "enable_lora": only(False, otherwise=_NO_LORA),
    "lora_config": Section(_lora_config),
    "peft_cache_config": ignored("only LoRA uses it"),
    "enable_prompt_adapter": only(False, otherwise="prompt tables are not supported; leave it out"),
    "max_prompt_adapter_token": only(0, otherwise="prompt tables are not supported; leave it out"),
    "kv_cache_config": KV_CACHE,
    **dict.fromkeys(("kv_cache_free_gpu_memory_fraction", "free_gpu_memory_fraction"), MEMORY),
    "kv_cache_compression_config": refused("the KV cache is not compressed; leave it out"),
    "scheduler_config": SCHEDULER,
    "reorder_policy_config": refused("requests are served by priority, then by arrival; leave it out"),
    "speculative_config": Section(judge_speculation),
    "decoding_config": refused("it is deprecated; use speculative_config"),
    "build_config": BUILD,
    "enable_chunked_prefill": became(BOOLEAN, serve="scheduler_config.enable_chunked_context"),
    "guided_decoding_backend": ignored("requests ask for guided decoding, and llguidance is the only backend"),
    "batched_logits_processor": refused("logits processors are not run; leave it out"),
    "logits_post_processors": refused("logits processors are not run; leave it out"),
    "reasoning_parser": refused("reasoning is not separated from text; leave it out"),
    "post_processor_hook": refused("modules are not loaded into the server; leave it out"),
    "generation_config": ignored("a request's own fields count, then generation_config.json of the checkpoint"),
    "enable_early_first_token_response": ignored("tokens are sent when the step that made them ends"),
    "num_serve_frontends": ignored("Triton is the front end"),
    "telemetry_config": ignored("nothing is sent anywhere"),
    "prometheus_metrics_config": METRICS,
    "enable_energy_metrics": ignored("energy is not measured"),
    "max_batch_size": BUILD["max_batch_size"],
    "max_input_len": BUILD["max_input_len"],
    "max_seq_len": BUILD["max_seq_len"],
    "max_beam_width": _BEAMS,
    "max_num_tokens": BUILD["max_num_tokens"],
    "gather_generation_logits": BUILD["gather_generation_logits"],
    "normalize_log_probs": only(False, otherwise="it is a parameter of the model tensorrt_llm; set it in config.pbtxt"),
    "batching_type": only("INFLIGHT", otherwise="batching is in flight; leave it out"),
    "quant_config": Section(_quantization),
    "calib_config": ignored("faser build calibrates on a text file, --calib_dataset"),
    "cache_transceiver_config": refused("prompt and generation run in one process; leave it out"),
    "kv_connector_config": refused("KV caches are not shared between servers; leave it out"),
    "sparse_attention_config": refused("attention is dense; leave it out"),
    "mm_encoder_only": only(False, otherwise="multimodal models are not served; leave it out"),
    "disable_mm_encoder": _NO_ENCODER,
    "multimodal_config": ignored("multimodal input is not served"),
    "encode_only": only(False, otherwise="models generate here; leave it out"),
    **dict.fromkeys(
        (
            *("encoder_cuda_graph_config", "encoder_max_batch_size", "encoder_max_num_tokens"),
            "enable_encoder_decoder_mixed_cuda_graph",
        ),
        _NO_ENCODER,
    ),
    **dict.fromkeys(("hostname", "port", "context_servers", "generation_servers", "disagg_cluster"), _SERVERS),
    "world_size": only(0, 1, otherwise=_RANKS),
    "skip_loading_weights": only(False, otherwise="weights are read from the checkpoint; leave it out"),
    "speculative_model_kwargs": refused("a checkpoint's config.json is taken as it is; change it there"),
    **dict.fromkeys(
        ("runtime", "compile_backend", "model_factory", "transforms", "cuda_graph_batch_sizes"),
        ignored("it configures TensorRT-LLM's AutoDeploy"),
    ),
    "otlp_traces_endpoint": became(TEXT, serve="otlp_traces_endpoint", note="OTLP over HTTP"),
    "env_overrides": Section(_environment),
    "orchestrator_type": only("rpc", otherwise="processes are started by Triton; leave it out"),
    "mpi_session": refused("processes are started by Triton; leave it out"),
    "ray_worker_extension_cls": refused("processes are started by Triton; leave it out"),
    "ray_placement_config": refused("processes are started by Triton; leave it out"),
    "backend": ignored("faser build --backend chooses what runs a model"),
    "triton_config": ignored("our models are decoupled and batch in flight"),
    **dict.fromkeys(
        (
            "iter_stats_max_iterations",
            "request_stats_max_iterations",
            "return_perf_metrics",
            "perf_metrics_max_requests",
            "enable_iter_perf_stats",
            "enable_iter_req_stats",
            "print_iter_log",
            "max_stats_len",
        ),
        METRICS,
    ),
    **dict.fromkeys(("batch_wait_timeout_ms", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"), _WAITING),
    "stream_interval": became(whole(1), serve="stream_interval"),
    **dict.fromkeys(
        ("num_postprocess_workers", "postprocess_tokenizer_dir"), ignored("the engine process detokenizes")
    ),
    "disable_overlap_scheduler": ignored("the policy chooses how drafting and verifying overlap"),
    **dict.fromkeys(
        (
            *("sampler_type", "sampler_force_async_worker", "disable_flashinfer_sampling"),
            "enable_in_graph_sampling",
        ),
        _OWN_SAMPLING,
    ),
    "force_dynamic_quantization": only(
        False, otherwise="scales of activations in fp8 are static in the TensorRT backends; leave it out"
    ),
    "enable_sleep": only(False, otherwise="sleep mode is not supported; stop the server and start it again"),
    "moe_config": EXPERTS,
    "dwdp_config": EXPERTS,
    **dict.fromkeys(
        (
            "garbage_collection_gen0_threshold",
            "cuda_graph_config",
            "nvfp4_gemm_config",
            "attn_backend",
            "torch_compile_config",
            "enable_autotuner",
            "enable_layerwise_nvtx_marker",
            "enable_min_latency",
            "allreduce_strategy",
            "use_cute_dsl_blockscaling_mm",
            "use_cute_dsl_blockscaling_bmm",
            "layer_wise_benchmarks_config",
            *("use_cute_dsl_bf16_bmm", "use_cute_dsl_bf16_gemm", "use_fine_grained_sync"),
            *("prefill_capture_num_tokens", "prefill_cuda_graph_backend", "enable_low_latency_host_dispatch"),
            *("enable_resource_governor", "enable_speculative_beam_history_d2h"),
            *("enable_mla_skip_correction", "mla_skip_correction_threshold"),
            "extended_runtime_perf_knob_config",
            "embedding_parallel_mode",
            "fast_build",
            "enable_build_cache",
            "enable_tqdm",
            "workspace",
            "fail_fast_on_attention_window_too_large",
        ),
        _TUNING,
    ),
}

ENGINE_CONFIG: Rules = {
    "version": ignored("it is the version that built the other engine"),
    "faser": ignored("faser build adds it"),
    "pretrained_config": Section(_pretrained),
    "build_config": BUILD,
}
