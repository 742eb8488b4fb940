"""The keys of kv_cache_config, with a rule for each."""

from __future__ import annotations

from typing import Any

from faser_trtllm.trtllm.convert.verdict import (
    BOOLEAN,
    FRACTION,
    TEXT,
    Rules,
    Verdict,
    became,
    ignored,
    only,
    refused,
    whole,
)

EXPERTS = ignored("each backend has one implementation of experts")
METRICS = ignored("metrics are always on, at the metrics port")
_OWN_CACHE = ignored("the KV cache manager is our own")
_NO_EVENTS = ignored("KV cache events are not sent")
_IN_TOKENS = ignored("max_tokens limits the KV cache, and on a GPU free_gpu_memory_fraction")
MEMORY = became(
    FRACTION,
    serve="kv_cache_config.free_gpu_memory_fraction",
    note="on a GPU; on a CPU the KV cache is sized in tokens, up to 4 GiB",
)
_NO_OFFLOAD = ignored("blocks are not moved to the host")


def _dtype(key: str, value: Any) -> Verdict:
    if value == "fp8":
        return became(TEXT, serve="kv_cache_config.dtype", note="on cuda engines")(key, value)
    return only("auto", "bfloat16", otherwise="the KV cache has the engine's type or fp8; leave it at auto")(key, value)


KV_CACHE: Rules = {
    "enable_block_reuse": became(BOOLEAN, serve="kv_cache_config.enable_block_reuse"),
    "max_tokens": became(whole(1), serve="kv_cache_config.max_tokens"),
    "max_attention_window": refused("attention windows are the checkpoint's; leave it out"),
    "sink_token_length": only(0, otherwise="sink tokens are not supported; leave it out"),
    "free_gpu_memory_fraction": MEMORY,
    "max_gpu_total_bytes": _IN_TOKENS,
    "avg_seq_len": _IN_TOKENS,
    "pool_ratio": _OWN_CACHE,
    "host_cache_size": ignored("blocks are not offloaded to the host; evicted blocks are recomputed"),
    **dict.fromkeys(
        (
            *("onboard_blocks", "secondary_offload_min_priority"),
            *("disk_cache_size", "disk_cache_path", "disk_prefetch_num_reqs"),
        ),
        _NO_OFFLOAD,
    ),
    "block_reuse_config": {
        "policy": only(
            "all_reusable",
            otherwise="blocks are reused by every request; set kv_cache_config.enable_block_reuse to false instead",
        ),
        "max_num_turns": ignored("blocks are reused by every request"),
    },
    "cross_kv_cache_fraction": refused("encoder-decoder models are not served; leave it out"),
    **dict.fromkeys(
        (
            *("event_buffer_max_size", "attention_dp_events_gather_period_ms"),
            *("kv_events_config", "kv_cache_event_hash_algo"),
        ),
        _NO_EVENTS,
    ),
    "iteration_stats_interval": METRICS,
    "enable_partial_reuse": ignored("whole blocks are reused"),
    "copy_on_partial_reuse": ignored("whole blocks are reused"),
    "use_uvm": ignored("the KV cache is in device memory"),
    "dtype": _dtype,
    **dict.fromkeys(
        (
            *("mamba_ssm_cache_dtype", "mamba_ssm_stochastic_rounding", "mamba_ssm_philox_rounds"),
            *("mamba_state_config", "mamba_state_cache_interval"),
        ),
        ignored("models with a recurrent state are not served"),
    ),
    "tokens_per_block": became(whole(1), build="tokens_per_block"),
    **dict.fromkeys(
        (
            *("use_kv_cache_manager_v2", "max_util_for_resume", "enable_swa_scratch_reuse"),
            *("fp8_context_mla_kv_len_cap", "enable_kv_pool_rebalance", "kv_pool_rebalance_check_interval"),
            *("kv_pool_rebalance_cooldown_secs", "kv_pool_rebalance_min_sampled_kv_caches"),
            *("kv_pool_rebalance_moving_average_decay", "kv_pool_rebalance_ratio_threshold"),
            "kv_pool_rebalance_target_ratio_update_interval",
        ),
        _OWN_CACHE,
    ),
}
