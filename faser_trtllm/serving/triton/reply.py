"""Builds the output tensors of one response, with TensorRT-LLM's names, shapes and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text.finish_reason import spell_finish
from faser_trtllm.serving.text.request import Statistics, TextOutput, TopLogProbs
from faser_trtllm.serving.triton.contract import ModelContract
from faser_trtllm.serving.triton.request import Part, RequestedStats

Tensors = dict[str, npt.NDArray[Any]]

MIN_LOG_PROB = -9999.0
"""The log prob of impossible tokens, as in OpenAI and vLLM: Triton's HTTP would write -Infinity, which is not JSON."""
MAX_STREAMED_LOG_PROBS = 8192  # tokens of a stream that sends all log probs again with each token: 128 MiB


def check_log_probs(contract: ModelContract, part: Part, num_output: int) -> None:
    """Raise InvalidArgumentError if a stream of num_output tokens would repeat too many log probs."""
    request = part.request
    if contract.is_trtllm and request.stream and request.return_log_probs and num_output > MAX_STREAMED_LOG_PROBS:
        raise InvalidArgumentError(
            f"with stream and {num_output} output tokens sends the log probs of all tokens with each token, allowed "
            f"are {MAX_STREAMED_LOG_PROBS} tokens; lower max_tokens, or use the model faser, which only sends new ones",
            "return_log_probs",
            num_output,
            MAX_STREAMED_LOG_PROBS,
        )


def output_tensors(
    contract: ModelContract, part: Part, output: TextOutput, log_probs_so_far: Sequence[float], cum_log_prob: float
) -> Tensors:
    """Return the tensors of a response by name, with batch size 1, without those that the client did not ask for.

    log_probs_so_far, cum_log_prob: the log probs of all tokens of the sequence so far, and their sum. In a stream,
    TensorRT-LLM's models send all log probs so far with each response, and counts of that response. The model `faser`
    sends only new log probs, and counts of the whole output at the end or, with return_perf_metrics, each time.
    """
    request, token_ids = part.request, output.token_ids
    num_new, num_top = len(token_ids), request.num_top_log_probs
    tensors: Tensors = {}
    if contract.has_text:
        tensors["text_output"] = np.array([output.text.encode()], dtype=np.object_)
    elif not request.stream and not request.exclude_input_in_output:
        token_ids = (*(request.token_ids or ()), *token_ids)
    tensors["output_ids"] = np.array([[token_ids]], dtype=np.int32)
    tensors["sequence_length"] = _int32(len(token_ids))
    if request.return_generation_logits:
        logits = _finite(np.frombuffer(output.logits, np.float32), np.finfo(np.float32).min)
        tensors["generation_logits"] = logits.reshape(1, 1, num_new, -1 if logits.size else 0)
    if request.return_log_probs:
        log_probs = log_probs_so_far if contract.is_trtllm else output.log_probs
        tensors["output_log_probs"] = _finite(np.array([[log_probs]], np.float32))
        tensors["cum_log_probs"] = _finite(np.array([[cum_log_prob]], np.float32), np.finfo(np.float32).min)
        tensors |= _tops("output", output.tops, num_new, num_top)
    if output.context is not None:
        context = output.context
        tensors["context_ids"] = np.array([[context.token_ids]], np.int32)
        tensors["context_log_probs"] = _finite(np.array([[context.log_probs]], np.float32))
        tensors |= _tops("context", context.tops, len(context.log_probs), num_top)
    if part.batch_index is not None:
        tensors["batch_index"] = _int32(part.batch_index)
    if part.sequence_index is not None:
        tensors["sequence_index"] = _int32(part.sequence_index)
    statistics = output.statistics
    if statistics is not None:
        is_of_response = contract.is_trtllm and request.stream
        tensors |= _counts(part.stats, statistics, len(token_ids) if is_of_response else statistics.num_output_tokens)
        if output.finish_reason is not None:
            finish = spell_finish(output.finish_reason, statistics.is_synthetic)
            tensors["finish_reason"] = np.array([finish.encode()], dtype=np.object_)
        if output.is_final and request.prediction:
            tensors["accepted_prediction_tokens"] = _int32(statistics.num_predicted)
            tensors["rejected_prediction_tokens"] = _int32(statistics.num_mispredicted)
    if output.acceptance is not None:
        steps = output.acceptance
        for name, counts in (("histogram", steps.histogram), ("drafted", steps.drafted), ("accepted", steps.accepted)):
            tensors[f"acceptance_{name}"] = np.array([counts], np.int32)
    if request.return_is_draft:
        tensors["output_is_draft"] = np.array([[output.is_draft]], dtype=np.bool_)
    return tensors


def _counts(asked: RequestedStats, statistics: Statistics, num_output_tokens: int) -> Tensors:
    counts: Tensors = {}
    if asked.num_input_tokens:
        counts["num_input_tokens"] = _int32(statistics.num_input_tokens)
        counts["num_cached_tokens"] = _int32(statistics.num_cached_tokens)
    if asked.num_output_tokens:
        counts["num_output_tokens"] = _int32(num_output_tokens)
    if asked.perf_metrics:
        new, reused = statistics.num_new_blocks, statistics.num_reused_blocks
        counts["kv_cache_alloc_new_blocks"] = _int32(new)
        counts["kv_cache_reused_blocks"] = _int32(reused)
        counts["kv_cache_alloc_total_blocks"] = _int32(new + reused)
        for event in ("arrival", "first_scheduled", "first_token", "last_token"):
            time_ns = getattr(statistics, f"{event}_time_ns") or 0
            counts[f"{event}_time_ns"] = np.array([[time_ns]], np.int64)
    if asked.acceptance:
        counts["acceptance_rate"] = np.array([[statistics.acceptance_rate]], np.float32)
        counts["total_accepted_draft_tokens"] = _int32(statistics.num_accepted_tokens)
        counts["total_draft_tokens"] = _int32(statistics.num_draft_tokens)
    return counts


def _tops(name: str, tops: TopLogProbs, num_places: int, num_top: int) -> Tensors:
    """Return two outputs [1, 1, num_places, min(num_top, vocab_size)], or {} if num_top is 0."""
    if not num_top:
        return {}
    shape = 1, 1, num_places, -1 if num_places else 0
    ids, log_probs = np.frombuffer(tops.ids, np.int32), np.frombuffer(tops.log_probs, np.float32)
    return {f"{name}_top_ids": ids.reshape(shape), f"{name}_top_log_probs": _finite(log_probs).reshape(shape)}


def _finite(
    values: npt.NDArray[np.float32], lowest: np.floating[Any] | float = MIN_LOG_PROB
) -> npt.NDArray[np.float32]:
    """Raise values below `lowest` to it. NaN stays; the engine refuses it earlier."""
    found: npt.NDArray[np.float32] = np.maximum(values, np.float32(lowest))
    return found


def _int32(value: int) -> npt.NDArray[np.int32]:
    return np.array([[value]], np.int32)
