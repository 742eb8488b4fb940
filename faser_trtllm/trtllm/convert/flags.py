"""Convert the flags of trtllm-build and trtllm-serve that our commands lack or name differently.

A flag is treated like the configuration key with the same meaning (rules.py): accepted, ignored with a reason, or
refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.trtllm.convert.convert import Conversion, gather
from faser_trtllm.trtllm.convert.kv_cache import KV_CACHE
from faser_trtllm.trtllm.convert.rules import BUILD, LLM_API, judge_plugin
from faser_trtllm.trtllm.convert.verdict import Rule, Verdict, ignored, only, refused

_MULTIMODAL = refused("multimodal models are not served; leave it out")
_PARSERS = refused("the output is not parsed; leave it out")
_DISAGGREGATED = refused("prompt and generation run in one process; leave it out")
_LOG = ignored("messages of level warning and above are written")


def _rule(rules: Mapping[str, Any], key: str) -> Rule:
    rule = rules[key]
    assert callable(rule), key
    return rule  # type: ignore[no-any-return]


SERVE_FLAGS: Mapping[str, Rule] = {
    **{
        f"--{key}": _rule(LLM_API, key)
        for key in (
            *("tokenizer", "custom_tokenizer", "trust_remote_code", "revision", "backend", "gpus_per_node"),
            *("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width", "enable_chunked_prefill"),
            *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "enable_attention_dp"),
            *("moe_expert_parallel_size", "moe_cluster_parallel_size", "num_postprocess_workers", "reasoning_parser"),
            *("otlp_traces_endpoint", "fail_fast_on_attention_window_too_large"),
        )
    },
    "--tp_size": _rule(LLM_API, "tensor_parallel_size"),
    "--pp_size": _rule(LLM_API, "pipeline_parallel_size"),
    "--cp_size": _rule(LLM_API, "context_parallel_size"),
    "--ep_size": _rule(LLM_API, "moe_expert_parallel_size"),
    "--cluster_size": _rule(LLM_API, "moe_cluster_parallel_size"),
    "--hf_revision": _rule(LLM_API, "revision"),
    "--kv_cache_free_gpu_memory_fraction": _rule(KV_CACHE, "free_gpu_memory_fraction"),
    "--kv_cache_free_gpu_mem_fraction": _rule(KV_CACHE, "free_gpu_memory_fraction"),
    "--free_gpu_memory_fraction": _rule(KV_CACHE, "free_gpu_memory_fraction"),
    "--kv_cache_dtype": _rule(KV_CACHE, "dtype"),
    "--kv-connector": _rule(LLM_API, "kv_connector_config"),
    "--log_level": _LOG,
    "--grpc": ignored("gRPC is always served, at --grpc_port"),
    "--telemetry": ignored("nothing is sent anywhere"),
    "--no-telemetry": ignored("nothing is sent anywhere"),
    "--generation-config": ignored("a request's own fields count, then generation_config.json of the checkpoint"),
    "--served_model_name": refused(
        "Triton's models have the names of their directories; leave it out, or start faser openai with it"
    ),
    "--chat_template": refused("only faser openai applies it; leave it out, or start faser openai with it"),
    "--allow_request_chat_template": refused("a request cannot set the chat template; leave it out"),
    "--tool_parser": _PARSERS,
    "--metadata_server_config_file": _DISAGGREGATED,
    "--server_role": _DISAGGREGATED,
    "--disagg_cluster_uri": _DISAGGREGATED,
    "--media_io_kwargs": _MULTIMODAL,
    "--enable_visual_gen": _MULTIMODAL,
    "--visual_gen_args": _MULTIMODAL,
    "--video_pruning_rate": _MULTIMODAL,
    "--custom_module_dirs": refused("modules are not loaded into the server; leave it out"),
    "--middleware": refused("modules are not loaded into the server; leave it out"),
    "--post_processor_hook": refused("modules are not loaded into the server; leave it out"),
}

_PLUGIN_FLAGS = (
    *("bert_attention_plugin", "gpt_attention_plugin", "gemm_plugin", "gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin"),
    *("qserve_gemm_plugin", "nccl_plugin", "lora_plugin", "dora_plugin", "moe_plugin", "mamba_conv1d_plugin"),
    *("low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin", "gemm_allreduce_plugin", "context_fmha"),
    *("bert_context_fmha_fp32_acc", "remove_input_padding", "paged_kv_cache", "norm_quant_fusion", "reduce_fusion"),
    *("user_buffer", "use_paged_context_fmha", "use_fp8_context_fmha", "fuse_fp4_quant", "multiple_profiles"),
    *("paged_state", "streamingllm", "use_fused_mlp", "pp_reduce_scatter"),
)

BUILD_FLAGS: Mapping[str, Rule] = {
    **{
        f"--{key}": _rule(BUILD, key)
        for key in (
            *("max_input_len", "max_beam_width", "opt_num_tokens", "max_prompt_embedding_table_size", "kv_cache_type"),
            *("profiling_verbosity", "enable_debug_output", "speculative_decoding_mode"),
            *("gather_context_logits", "gather_generation_logits", "input_timing_cache", "output_timing_cache"),
            *("strip_plan", "weight_sparsity", "weight_streaming", "visualize_network", "monitor_memory"),
        )
    },
    **{f"--{name}": judge_plugin for name in _PLUGIN_FLAGS},
    "--max_encoder_input_len": refused("encoder-decoder models are not served; leave it out"),
    "--max_decoder_seq_len": _rule(BUILD, "max_seq_len"),
    "--max_multimodal_len": _rule(BUILD, "max_prompt_embedding_table_size"),
    "--gather_all_token_logits": _rule(BUILD, "gather_context_logits"),
    "--logits_dtype": only("float32", otherwise="logits are float32; leave it out"),
    "--tokenizer": _rule(LLM_API, "tokenizer"),
    "--fast_build": _rule(LLM_API, "fast_build"),
    "--workers": ignored("target and draft are built one after another"),
    "--log_level": _LOG,
    "--model_config": refused("checkpoints are in Hugging Face's format; use --checkpoint_dir"),
    "--model_cls_file": refused("model families are part of faser_trtllm; leave it out"),
    "--model_cls_name": refused("model families are part of faser_trtllm; leave it out"),
    "--auto_parallel": _rule(LLM_API, "tensor_parallel_size"),
    "--gpus_per_node": _rule(LLM_API, "gpus_per_node"),
    "--cluster_key": _rule(LLM_API, "gpus_per_node"),
    **dict.fromkeys(
        ("--lora_dir", "--lora_ckpt_source", "--lora_target_modules", "--max_lora_rank"),
        refused("LoRA is not supported; merge the weights into the checkpoint"),
    ),
}

_SWITCHES = frozenset(
    (
        *("--trust_remote_code", "--enable_chunked_prefill", "--enable_attention_dp", "--grpc", "--telemetry"),
        *("--no-telemetry", "--allow_request_chat_template", "--enable_visual_gen", "--enable_debug_output"),
        *("--fail_fast_on_attention_window_too_large", "--gather_context_logits", "--gather_generation_logits"),
        *("--gather_all_token_logits", "--strip_plan", "--weight_sparsity", "--weight_streaming", "--fast_build"),
        *("--monitor_memory",),
    )
)
"""Flags that take no value."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The converted flags, and the positional arguments."""

    conversion: Conversion
    positional: tuple[str, ...]

    def without(self, subcommand: str, is_named: bool) -> tuple[str, ...]:
        """Return the positional arguments without the subcommand. is_named: a flag gives the model."""
        found = self.positional
        return found[1:] if found[:1] == (subcommand,) and (is_named or len(found) > 1) else found


def judge_flags(arguments: Sequence[str], known: Mapping[str, Rule], own: Sequence[str]) -> Flags:
    """Convert the arguments that a command did not know. own: the command's flags, for suggestions.

    Raises InvalidArgumentError for an unknown flag, a missing value, or the first refused flag.
    """
    positional: list[str] = []
    conversion = gather("flags", _verdicts(list(arguments), known, own, positional))
    conversion.check()
    return Flags(conversion, tuple(positional))


def _verdicts(
    arguments: list[str], known: Mapping[str, Rule], own: Sequence[str], positional: list[str]
) -> Iterator[Verdict]:
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("-"):
            positional.append(argument)
            continue
        flag, equals, text = argument.partition("=")
        rule = known.get(flag)
        if rule is None:
            close = difflib.get_close_matches(flag, [*own, *known], n=1)
            hint = f"did you mean {close[0]}?" if close else "see --help"
            raise InvalidArgumentError(f"{flag} is not an option; {hint}")
        if flag in _SWITCHES and not equals:
            yield rule(flag, True)
            continue
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                raise InvalidArgumentError(f"{flag} has no value; give it one")
            text = arguments.pop(0)
        yield rule(flag, _value(text))


def _value(text: str) -> Any:
    """Return a text's YAML value if that is a boolean or a number, else the text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    return value if isinstance(value, (bool, int, float)) else text
