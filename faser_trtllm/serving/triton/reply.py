"""The output tensors of one Triton request, with TensorRT-LLM's names, shapes and order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.serving.text.finish_reason import spell_finish
from faser_trtllm.serving.text.request import Statistics, TopLogProbs
from faser_trtllm.serving.triton.contract import ModelContract
from faser_trtllm.serving.triton.request import Part, RequestedStats
from faser_trtllm.serving.worker.messages import Chunk

NewTensor = Callable[[str, npt.NDArray[Any]], Any]


class Reply:
    """Turns chunks into output tensors. Like TensorRT-LLM, it leaves out what the client did not ask for.

    TensorRT-LLM's models send the log probs of all tokens so far with each response of a stream, and counts of this
    response's tokens. The model `faser` sends new log probs, and counts at the end or, with return_perf_metrics, so
    far.
    """

    def __init__(
        self, new_tensor: NewTensor, contract: ModelContract, requested: RequestedStats, parts: Sequence[Part]
    ) -> None:
        self._new_tensor = new_tensor
        self._contract = contract
        self._requested = requested
        self._parts = parts
        self._cum_log_probs = [0.0] * len(parts)
        self._log_probs = [array("f") for _ in parts]
        self._has_batch = any(part.batch_index for part in parts)
        self._has_sequences = any(part.sequence_index for part in parts)

    def tensors(self, place: int, chunk: Chunk) -> list[Any]:
        """The tensors of one response, all of batch size 1. place: index of the part that the chunk belongs to."""
        part = self._parts[place]
        request = part.request
        outputs: dict[str, npt.NDArray[Any]] = {}
        token_ids = chunk.token_ids
        if self._contract.has_text:
            outputs["text_output"] = np.array([chunk.text.encode()], dtype=np.object_)
        elif not request.stream and not request.exclude_input_in_output:
            token_ids = (*(request.token_ids or ()), *token_ids)
        outputs["output_ids"] = np.array([[token_ids]], dtype=np.int32)
        outputs["sequence_length"] = _int32(len(token_ids))
        if request.return_generation_logits:
            logits = np.frombuffer(chunk.logits, np.float32)
            outputs["generation_logits"] = logits.reshape(1, 1, len(chunk.token_ids), -1 if logits.size else 0)
        if request.return_log_probs:
            outputs |= self._log_probs_of(place, chunk)
            outputs |= _tops("output", chunk.tops, len(chunk.token_ids), request.num_top_log_probs)
        context = chunk.context
        if context is not None:
            outputs["context_ids"] = np.array([[context.token_ids]], np.int32)
            outputs["context_log_probs"] = np.array([[context.log_probs]], np.float32)
            outputs |= _tops("context", context.tops, len(context.log_probs), request.num_top_log_probs)
        if self._has_batch:
            outputs["batch_index"] = _int32(part.batch_index)
        if self._has_sequences:
            outputs["sequence_index"] = _int32(part.sequence_index)
        statistics = chunk.statistics
        if statistics is not None:
            per_response = self._contract.is_trtllm and request.stream
            outputs |= self._counts(statistics, len(token_ids) if per_response else statistics.num_output_tokens)
            if chunk.finish_reason is not None:
                finish = spell_finish(chunk.finish_reason, statistics.is_synthetic)
                outputs["finish_reason"] = np.array([finish.encode()], dtype=np.object_)
        if request.return_is_draft:
            outputs["output_is_draft"] = np.array([[chunk.is_draft]], dtype=np.bool_)
        return [self._new_tensor(name, values) for name, values in outputs.items() if name in self._contract.outputs]

    def _log_probs_of(self, place: int, chunk: Chunk) -> dict[str, npt.NDArray[Any]]:
        self._cum_log_probs[place] += sum(chunk.log_probs)
        log_probs = np.array(chunk.log_probs, np.float32)
        if self._contract.is_trtllm:
            so_far = self._log_probs[place]
            so_far.extend(chunk.log_probs)
            log_probs = np.array(so_far, np.float32)
        cum_log_probs = np.array([[self._cum_log_probs[place]]], np.float32)
        return {"output_log_probs": log_probs[None, None], "cum_log_probs": cum_log_probs}

    def _counts(self, statistics: Statistics, num_output_tokens: int) -> dict[str, npt.NDArray[Any]]:
        requested = self._requested
        counts: dict[str, npt.NDArray[Any]] = {}
        if requested.num_input_tokens:
            counts["num_input_tokens"] = _int32(statistics.num_input_tokens)
            counts["num_cached_tokens"] = _int32(statistics.num_cached_tokens)
        if requested.num_output_tokens:
            counts["num_output_tokens"] = _int32(num_output_tokens)
        if requested.perf_metrics:
            new, reused = statistics.num_new_blocks, statistics.num_reused_blocks
            counts["kv_cache_alloc_new_blocks"] = _int32(new)
            counts["kv_cache_reused_blocks"] = _int32(reused)
            counts["kv_cache_alloc_total_blocks"] = _int32(new + reused)
            for event in ("arrival", "first_scheduled", "first_token", "last_token"):
                time_ns = getattr(statistics, f"{event}_time_ns") or 0
                counts[f"{event}_time_ns"] = np.array([[time_ns]], np.int64)
        if requested.acceptance:
            counts["acceptance_rate"] = np.array([[statistics.acceptance_rate]], np.float32)
            counts["total_accepted_draft_tokens"] = _int32(statistics.num_accepted_tokens)
            counts["total_draft_tokens"] = _int32(statistics.num_draft_tokens)
        return counts


def _tops(name: str, tops: TopLogProbs, num_places: int, num_top: int) -> dict[str, npt.NDArray[Any]]:
    """Two outputs [1, 1, num_places, num_top], or as many as the vocabulary has; none if none are asked for."""
    if not num_top:
        return {}
    shape = 1, 1, num_places, -1 if num_places else 0
    ids, log_probs = np.frombuffer(tops.ids, np.int32), np.frombuffer(tops.log_probs, np.float32)
    return {f"{name}_top_ids": ids.reshape(shape), f"{name}_top_log_probs": log_probs.reshape(shape)}


def _int32(value: int) -> npt.NDArray[np.int32]:
    return np.array([[value]], np.int32)
