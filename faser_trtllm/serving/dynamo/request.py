"""Converts Dynamo's requests to ours, and our outputs to Dynamo's chunks. Does not import Dynamo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request_field import rows
from faser_trtllm.core.sampling_params import SamplingFields, SamplingParams
from faser_trtllm.errors import InvalidArgumentError

_ELSEWHERE = ("max_tokens", "min_tokens", "num_draft_tokens")  # Dynamo sends these in stop_conditions and extra_args
_SAMPLING = {row.name for row in rows(SamplingFields) if row.openai} - {*_ELSEWHERE} | {"logit_bias", "cache_salt_id"}
_NEUTRAL = {  # unsupported sampling options and the values that have no effect
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
}
_FOREIGN = ("prefill_result", "bootstrap_info", "multi_modal_data", "encoder_result")


def read_token_ids(request: Mapping[str, Any]) -> list[int]:
    """Read the prompt from a list or from little-endian int32 bytes; raise InvalidArgumentError."""
    value = request.get("token_ids")
    if isinstance(value, bytes | bytearray | memoryview):
        if memoryview(value).nbytes % 4:
            num_bytes = memoryview(value).nbytes
            raise InvalidArgumentError(
                f"has {num_bytes} bytes; it must be a multiple of 4 (int32)", "token_ids", num_bytes
            )
        return list(np.frombuffer(value, "<i4").tolist())
    if value is not None and not isinstance(value, Sequence):
        raise InvalidArgumentError(f"is {value!r:.80}; it must be a list of token ids", "token_ids", value)
    return list(value or ())


def read_params(request: Mapping[str, Any], max_seq_len: int, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Read the sampling parameters of a request; raise InvalidArgumentError for unsupported options.

    Defaults are those of OpenAI's API: temperature 1, no seed, output up to the end of the sequence. Dynamo itself
    finds stop words in the text. eos_token_ids: the tokenizer's, which end the output in addition to the request's.
    """
    for name in _FOREIGN:
        if request.get(name):
            raise InvalidArgumentError(
                "was sent, but this engine serves text only and does not split prefill from decode; leave it out", name
            )
    options = {name: value for name, value in _part(request, "sampling_options").items() if value is not None}
    fields: dict[str, Any] = {name: options.pop(name) for name in _SAMPLING if name in options}
    for name, value in options.items():
        if value not in _NEUTRAL.get(name, ()) and value not in ({}, []):
            what = f"has {name} {value!r}, which is not supported; leave it out"
            raise InvalidArgumentError(what, "sampling_options", value)
    fields.setdefault("temperature", 1.0)
    if fields.get("top_k") == -1:  # vLLM's spelling of "off"
        fields["top_k"] = 0
    try:
        fields["logit_bias"] = tuple((int(token), float(bias)) for token, bias in fields.get("logit_bias", {}).items())
    except (ValueError, TypeError, AttributeError, OverflowError):
        bias = fields["logit_bias"]
        raise InvalidArgumentError(f"is {bias!r:.80}; it must map token ids to numbers", "logit_bias", bias) from None
    if "allowed_token_ids" in fields:
        fields["allowed_token_ids"] = tuple(_ids(fields, "allowed_token_ids"))
    stop = _part(request, "stop_conditions")
    room = max(1, max_seq_len - len(read_token_ids(request)))
    fields["max_tokens"] = room if stop.get("max_tokens") is None else stop["max_tokens"]
    fields["min_tokens"] = stop.get("min_tokens") or 0
    fields["end_ids"] = _end_ids(request, stop, eos_token_ids)
    extra = _part(request, "extra_args")
    if extra.get("num_draft_tokens") is not None:
        fields["num_draft_tokens"] = extra["num_draft_tokens"]
    fields["return_log_probs"] = _wants_log_probs(_part(request, "output_options"))
    return SamplingParams(**fields)


def make_chunk(output: RequestOutput, num_sent_tokens: int) -> dict[str, Any]:
    """Return Dynamo's chunk for the new tokens. num_sent_tokens: how many tokens earlier chunks of the request had."""
    request, stats = output.request, output.request.stats
    end = num_sent_tokens + len(output.new_token_ids)
    chunk: dict[str, Any] = {"token_ids": list(output.new_token_ids), "index": 0}
    if request.keeps_rows and output.new_token_ids:
        chunk["log_probs"] = list(request.output_log_probs[num_sent_tokens:end])
    if output.finish_reason is not None:
        chunk["finish_reason"] = output.finish_reason.value
        chunk["completion_usage"] = {
            "prompt_tokens": request.prompt_len,
            "completion_tokens": end,
            "total_tokens": request.prompt_len + end,
            "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
        }
        chunk["engine_data"] = {
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
        }
    return chunk


def _part(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = request.get(name) or {}
    if not isinstance(part, Mapping):
        raise InvalidArgumentError(f"is {part!r}; it must be an object", name, part)
    return part


def _end_ids(request: Mapping[str, Any], stop: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    wanted = set(_ids(stop, "stop_token_ids"))
    if not stop.get("ignore_eos"):
        wanted |= {*_ids(stop, "stop_token_ids_hidden"), *_ids(request, "eos_token_ids"), *eos_token_ids}
    return tuple(sorted(wanted))


def _ids(part: Mapping[str, Any], name: str) -> Sequence[int]:
    found = part.get(name) or ()
    if not isinstance(found, Sequence) or not all(isinstance(token, int) for token in found):
        raise InvalidArgumentError(f"is {found!r:.80}; it must be a list of token ids", name, found)
    return found


def _wants_log_probs(output_options: Mapping[str, Any]) -> bool:
    if output_options.get("prompt_logprobs") is not None:
        raise InvalidArgumentError("has prompt_logprobs, which is not supported; leave it out", "output_options")
    wanted = output_options.get("logprobs")
    if wanted is None:
        return False
    if not isinstance(wanted, int) or wanted > 1:  # Dynamo sends 1 for "logprobs: true"
        raise InvalidArgumentError(
            f"has logprobs {wanted}, allowed are 0 and 1: only the chosen token has one; lower top_logprobs",
            "output_options",
            wanted,
            1,
        )
    return True
