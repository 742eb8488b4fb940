"""Settings of an executor that follow from a configuration and an engine directory, before engines are open."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import DrafterName, ExecutorConfig, SchedulerKind
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.engine.opening import OpenRequest, backend_of, check_request
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.batching import make_batching
from faser_trtllm.executor.trace import check_trace_file
from faser_trtllm.fingerprint import load_costs
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import make_policy

log = logging.getLogger(__name__)

WITHOUT_COSTS = ("off", "fixed", "schedule:")  # prefixes of policies that need no cost table
DEFAULT_KV_BYTES = 4 << 30  # on the CPU, where memory is taken only as it fills


def choose_limits(engines: EngineDir, config: ExecutorConfig) -> tuple[BuildConfig, int]:
    """Return the limits to open engines with, and the maximum number of KV blocks, of which a GPU may hold fewer.

    Raises ConfigError for limits beyond those the engines were built for, and if the scheduler is not available.
    """
    make_batching(config)
    built = engines.build_config
    limits = BuildConfig(
        _limit("max_batch_size", config.max_batch_size, built.max_batch_size),
        _limit("max_num_tokens", config.max_num_tokens, built.max_num_tokens),
        _limit("max_seq_len", config.max_seq_len, built.max_seq_len),
        _limit("max_draft_len", config.max_draft_len, built.max_draft_len),
        built.tokens_per_block,
    )
    if limits.max_num_tokens < limits.max_batch_size:
        raise ConfigError(
            f"max_num_tokens is {limits.max_num_tokens}; it must be at least max_batch_size ({limits.max_batch_size}), "
            "one row each"
        )
    return limits, _num_blocks(config, engines, limits)


def check_settings(engines: EngineDir, config: ExecutorConfig) -> None:
    """Raise the ConfigErrors of open_executor that show without open engines, before another process opens them."""
    limits, num_blocks = choose_limits(engines, config)
    CoreSet(config.cores, config.num_threads).close()
    check_request(
        OpenRequest(
            engines,
            limits,
            num_blocks,
            drafting=False,
            quantization=config.quantization,
            deterministic=config.deterministic,
            kv_dtype=config.kv_cache_config.dtype,
            num_branches=config.num_branches,
            gpu_partitions=config.gpu_partitions,
        )
    )
    drafts = limits.max_draft_len and config.speculation != "off"
    if config.num_branches and drafts and not may_branch(config, DrafterName.MODEL in choose_drafters(engines, config)):
        raise no_branches(config.num_branches)
    if config.trace_file:
        check_trace_file(Path(config.trace_file))


def may_branch(config: ExecutorConfig, has_model: bool) -> bool:
    """Return True if the other settings allow token trees. has_model: a draft model drafts."""
    return has_model and config.scheduler is SchedulerKind.NATIVE and config.synthetic_acceptance is None


def no_branches(num_branches: int) -> ConfigError:
    return ConfigError(
        f"num_branches is {num_branches}, which needs cpu or cuda engines with a draft model, the native scheduler and "
        "no synthetic acceptance; set it to 0"
    )


def choose_drafters(engines: EngineDir, config: ExecutorConfig) -> tuple[DrafterName, ...]:
    """Return the configured drafters, or by default the draft model, or the suffix drafter without one."""
    if config.drafters is None:
        return (DrafterName.MODEL,) if engines.has_draft else (DrafterName.SUFFIX,)
    if DrafterName.MODEL in config.drafters and not engines.has_draft:
        raise ConfigError(
            f"drafters has model, but {engines.path} has no draft engine; set it to [suffix], or build with "
            "--draft_checkpoint_dir"
        )
    return config.drafters


def choose_costs(engine_dir: Path, speculation: str, num_threads: int) -> CostTable | None:
    """Return the directory's cost table for this machine, None if none is needed, or if "auto" finds none (logged)."""
    if speculation.startswith(WITHOUT_COSTS):
        return None
    try:
        return load_costs(engine_dir, num_threads)
    except ConfigError as error:
        if speculation != "auto":
            raise
        log.warning("%s; speculating with fixed:4 until then", error)
        return None


def cost_gauges(costs: CostTable | None) -> dict[str, float]:
    """Return gauges for Executor.stats(): 1 for every kind of pass whose costs are doubtful."""
    return {} if costs is None else {f"doubtful_costs_{kind}": 1.0 for kind in costs.doubtful_kinds}


def policy_of(
    speculation: str,
    max_draft_len: int,
    max_batch_size: int,
    costs: CostTable | None,
    drafters: Collection[DrafterName],
) -> Policy:
    """Make a policy with costs from choose_costs(); raise ConfigError if the spelling is invalid."""
    if speculation == "auto":
        speculation = "price" if costs is not None else f"fixed:{min(4, max_draft_len)}"
    return make_policy(speculation, max_draft_len, costs, max_batch_size, drafters)


def _limit(name: str, wanted: int | None, built: int) -> int:
    if wanted is None:
        return built
    if wanted > built:
        raise ConfigError(
            f"{name} is {wanted}, the engines were built for {built}; lower it or rebuild with --{name} {wanted}"
        )
    return wanted


def _num_blocks(config: ExecutorConfig, engines: EngineDir, limits: BuildConfig) -> int:
    max_tokens, tokens_per_block = config.kv_cache_config.max_tokens, limits.tokens_per_block
    if max_tokens is not None:
        if max_tokens < tokens_per_block:
            raise ConfigError(
                f"kv_cache_config.max_tokens is {max_tokens}; it must hold at least one block of {tokens_per_block}"
            )
        return max_tokens // tokens_per_block
    max_blocks_per_seq = -(-limits.max_seq_len // tokens_per_block)
    wanted = limits.max_batch_size * max_blocks_per_seq
    if not backend_of(engines).on_cpu:
        return wanted
    affordable = DEFAULT_KV_BYTES // (engines.kv_bytes_per_token() * tokens_per_block)
    return max(max_blocks_per_seq, min(wanted, affordable))
