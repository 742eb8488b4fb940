"""The inputs of the Triton models: their names, and which are refused and why.

triton_model_repo/*/config.pbtxt declares outputs, dtypes and dims. The model `faser` is our own; the others have the
names, inputs and outputs of TensorRT-LLM's inflight_batcher_llm repository.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request_field import rows
from faser_trtllm.core.sampling_params import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIAS, check_count
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text.request import (
    MAX_BAD_TEXTS,
    MAX_STOP_CHARS,
    MAX_STOP_WORDS,
    MAX_WORDS,
    MAX_WORDS_CHARS,
    TextRequest,
)

Tensors = Mapping[str, npt.NDArray[Any]]

_ROWS = rows(TextRequest)

INPUTS: Mapping[str, str] = {
    "text_input": "BYTES",
    "input_ids": "INT32",
    "end_id": "INT32",
    "embedding_bias_weights": "FP32",
    "logit_bias_ids": "INT32",
    "logit_bias_values": "FP32",
    "num_return_sequences": "INT32",
    "beam_width": "INT32",
    "stream": "BOOL",
    "stop": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_perf_metrics": "BOOL",
    **{row.name: row.dtype for row in _ROWS},
}
"""Inputs of the model `faser` that have an effect, and the Triton type of each."""

ALIASES = {row.older_name: row.name for row in _ROWS if row.older_name}
ALIASES["return_kv_cache_reuse_stats"] = "return_perf_metrics"
"""Input names of older clients (TensorRT-LLM up to 0.18) and their current names."""

_ENCODER = "encoder-decoder models are not supported"
_PROMPT_TABLE = "prompt tables are not supported"
_MULTIMODAL = "images and videos are not supported"
_LORA = "LoRA is not supported"
_OTHER_DRAFTS = "draft tokens come from the engine's own drafters"
_RETENTION = "priorities of KV cache blocks are not supported"
_LOOKAHEAD = "lookahead decoding is not supported, draft tokens come from the engine's own drafters"
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
    "draft_acceptance_threshold": "draft tokens are accepted by an exact test that keeps the target's distribution",
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
    "return_context_logits": "prompt tokens found in the KV cache have no logits",
}
"""Inputs that are declared because clients may send them, and why they are refused.

A single 0, false or empty string counts as not sent.
"""

WITHOUT_EFFECT = (
    "pad_id",
    "length_penalty",
    "early_stopping",
    "beam_search_diversity_rate",
    "runtime_top_p_min",
    "runtime_top_p_reset_ids",
    "use_draft_logits",
)
"""Inputs without effect: they concern only beam search or top_p_decay, or ask for the default behavior."""

MAX_PROMPTS = 256
MAX_LISTS = 4  # all lists of a batch together may have as many entries as this many prompts may
MAX_ENTRIES: Mapping[str, tuple[int, int]] = {
    "stop_words": (MAX_STOP_WORDS, MAX_STOP_CHARS),
    "bad_words": (MAX_BAD_TEXTS, MAX_WORDS_CHARS),
    "embedding_bias_words": (MAX_WORDS, MAX_WORDS_CHARS),
    "embedding_bias_weights": (MAX_WORDS, MAX_WORDS),
    "allowed_token_ids": (MAX_ALLOWED_TOKENS, MAX_ALLOWED_TOKENS),
    "logit_bias_ids": (MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
    "logit_bias_values": (MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
}
"""Limits on the lists of one prompt, by input: entries, and characters or numbers in all entries together."""


@dataclass(frozen=True, slots=True)
class ModelContract:
    """The rules of one model for its inputs.

    With is_trtllm it has TensorRT-LLM's defaults: greedy unless top_k or top_p is given, top_p 0 means "not given",
    counts and statistics only on request, max_tokens required.
    """

    name: str
    is_trtllm: bool = True
    has_text: bool = True  # takes and returns text; otherwise token ids only
    renames: Mapping[str, str] = field(default_factory=dict)  # input name -> our name, where they differ

    @property
    def names(self) -> dict[str, str]:
        """Our field name -> the name that clients of this model use, where they differ."""
        return {ours: theirs for theirs, ours in self.renames.items()}

    def check_input(self, name: str, shape: Sequence[int], num_bytes: int, is_text: bool) -> None:
        """Raise InvalidArgumentError for an input that is too large for any batch, before any loop runs over it.

        The limits of each prompt are checked when it is read.
        """
        num_prompts, limits = shape[0] if shape else 1, MAX_ENTRIES.get(self._ours(name))
        check_count(name, num_prompts, MAX_PROMPTS, "prompts")
        if limits is not None:
            max_entries, max_chars = limits
            num_lists = min(num_prompts, MAX_LISTS)
            check_count(name, math.prod(shape), num_lists * max_entries)
            check_count(name, num_bytes, num_lists * 4 * (max_entries + max_chars), "bytes")  # UTF-8, and each size
        elif is_text:
            check_count(name, math.prod(shape), num_prompts)

    def _ours(self, name: str) -> str:
        return self.renames.get(name) or ALIASES.get(name, name)

    def canonical(self, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors by the names that all models share; raise InvalidArgumentError for refused inputs."""
        found: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in tensors.items():
            if name in REFUSED and not _is_none(tensor):
                raise InvalidArgumentError(f"was sent, but {REFUSED[name]}; leave it out", name)
            ours = self._ours(name)
            if ours in found:
                raise InvalidArgumentError(f"was sent twice, also under its other name; send {ours} only", ours)
            found[ours] = tensor
        return found


FASER = ModelContract("faser", is_trtllm=False)
ENSEMBLE = ModelContract("ensemble")
BLS = ModelContract("tensorrt_llm_bls")
TENSORRT_LLM = ModelContract(
    "tensorrt_llm",
    has_text=False,
    renames={
        "streaming": "stream",
        "len_penalty": "length_penalty",
        **{row.trtllm: row.name for row in _ROWS if row.trtllm},
    },
)

MODELS: Mapping[str, ModelContract] = {model.name: model for model in (FASER, ENSEMBLE, BLS, TENSORRT_LLM)}


def contract_of(model_name: str) -> ModelContract:
    """Return the rules of a model. An unknown name, such as a renamed copy, gets the rules of `faser`."""
    return MODELS.get(model_name, FASER)


def _is_none(tensor: npt.NDArray[Any]) -> bool:
    if tensor.dtype == np.object_:
        return not any(tensor.reshape(-1))
    return tensor.size == 0 or (tensor.size == tensor.shape[0] and not tensor.any())
