"""What TensorRT-LLM's Triton models take and give, as rules: names of inputs, what is refused and why, and outputs.

The tensors themselves (dtypes, dims) are declared in triton_model_repo/*/config.pbtxt. Models: `faser` is ours, the
others have the names, inputs and outputs of TensorRT-LLM's inflight_batcher_llm repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError

Tensors = Mapping[str, npt.NDArray[Any]]

ALIASES = {
    "min_length": "min_tokens",
    "random_seed": "seed",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
}
"""Inputs of older clients (TensorRT-LLM up to 0.18) and their names of today."""

_ENCODER = "encoder-decoder models are not supported"
_PROMPT_TABLE = "prompt tables are not supported"
_MULTIMODAL = "images and videos are not supported"
_LORA = "LoRA is not supported"
_OTHER_DRAFTS = "drafts come from the engine's own draft model"
_RETENTION = "priorities of KV cache blocks are not supported"
_LOOKAHEAD = "lookahead decoding is not supported, drafts come from the engine's own draft model"
_DISAGGREGATED = "disaggregated serving is not supported"

REFUSED: Mapping[str, str] = {
    "decoder_text_input": _ENCODER,
    "decoder_input_ids": _ENCODER,
    "decoder_input_lengths": _ENCODER,
    "encoder_input_features": _ENCODER,
    "encoder_output_lengths": _ENCODER,
    "cross_attention_mask": _ENCODER,
    "skip_cross_attn_blocks": _ENCODER,
    "prompt_embedding_table": _PROMPT_TABLE,
    "prompt_table_extra_id": _PROMPT_TABLE,
    "prompt_table_extra_ids": _PROMPT_TABLE,
    "prompt_vocab_size": _PROMPT_TABLE,
    "image_input": _MULTIMODAL,
    "image_bytes_input": _MULTIMODAL,
    "image_url_input": _MULTIMODAL,
    "video_bytes_input": _MULTIMODAL,
    "mrope_rotary_cos_sin": _MULTIMODAL,
    "mrope_position_deltas": _MULTIMODAL,
    "lora_task_id": _LORA,
    "lora_weights": _LORA,
    "lora_config": _LORA,
    "draft_input_ids": _OTHER_DRAFTS,
    "draft_logits": _OTHER_DRAFTS,
    "draft_acceptance_threshold": "a draft stands by the exact test, which leaves the target's distribution as it is",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "lookahead_window_size": _LOOKAHEAD,
    "lookahead_ngram_size": _LOOKAHEAD,
    "lookahead_verification_set_size": _LOOKAHEAD,
    "context_phase_params": _DISAGGREGATED,
    "return_context_logits": "logits of prompt tokens that are found in the KV cache do not exist",
}
"""Declared because clients may name them; a single 0, false or empty string is taken for "none"."""

WITHOUT_EFFECT = (
    "pad_id",
    "length_penalty",
    "early_stopping",
    "beam_search_diversity_rate",
    "runtime_top_p_min",
    "runtime_top_p_reset_ids",
    "use_draft_logits",
)
"""Accepted, and of no effect: of beam search or top_p_decay only, or how the exact test works anyway."""

CORE_OUTPUTS = (
    "cum_log_probs",
    "output_log_probs",
    "context_logits",
    "generation_logits",
    "batch_index",
    "sequence_index",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "num_input_tokens",
    "num_output_tokens",
)


@dataclass(frozen=True, slots=True)
class ModelContract:
    """One model's rules.

    renames: its inputs whose names differ from those of the others. is_trtllm: TensorRT-LLM's defaults hold (greedy
    unless top_k or top_p is given, a top_p of 0 is none, counts and statistics only on request, max_tokens required).
    has_text: text goes in and out, else token ids only.
    """

    name: str
    outputs: frozenset[str]
    is_trtllm: bool = True
    has_text: bool = True
    renames: Mapping[str, str] = field(default_factory=dict)

    def client_name(self, name: str) -> str:
        """What a client of this model calls an input."""
        return next((theirs for theirs, ours in self.renames.items() if ours == name), name)

    def client_message(self, message: str) -> str:
        """A sentence that begins with an input's name, with the client's name for it."""
        first, space, rest = message.partition(" ")
        return f"{self.client_name(first)}{space}{rest}"

    def canonical(self, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
        """Inputs by the names that all models share; raises InvalidArgumentError for what is refused by name."""
        found: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in tensors.items():
            if name in REFUSED and not _is_none(tensor):
                raise InvalidArgumentError(f"{name} was sent, but {REFUSED[name]}; leave it out")
            ours = self.renames.get(name) or ALIASES.get(name, name)
            if ours in found:
                raise InvalidArgumentError(f"{ours} was sent twice, also by its other name; send {ours} only")
            found[ours] = tensor
        return found


FASER = ModelContract(
    "faser",
    frozenset(("text_output", "output_ids", "finish_reason", *CORE_OUTPUTS)),
    is_trtllm=False,
)
ENSEMBLE = ModelContract("ensemble", frozenset(("text_output", *CORE_OUTPUTS)))
BLS = ModelContract("tensorrt_llm_bls", ENSEMBLE.outputs)
TENSORRT_LLM = ModelContract(
    "tensorrt_llm",
    frozenset(("output_ids", "sequence_length", *CORE_OUTPUTS)),
    has_text=False,
    renames={
        "request_output_len": "max_tokens",
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "streaming": "stream",
        "len_penalty": "length_penalty",
    },
)
MODELS: Mapping[str, ModelContract] = {model.name: model for model in (FASER, ENSEMBLE, BLS, TENSORRT_LLM)}


def contract_of(model_name: str) -> ModelContract:
    """The rules of a model; a model of any other name, such as a renamed copy, is ours."""
    return MODELS.get(model_name, FASER)


def _is_none(tensor: npt.NDArray[Any]) -> bool:
    if tensor.dtype == np.object_:
        return not any(tensor.reshape(-1))
    return tensor.size == 0 or (tensor.size == tensor.shape[0] and not tensor.any())
