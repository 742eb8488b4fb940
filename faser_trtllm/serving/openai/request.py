"""Translates OpenAI's completion and chat requests into inputs of the Triton model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.core.request_field import MAX_INT32, Bounds, rows
from faser_trtllm.core.sampling_params import MAX_LOGIT_BIAS, MAX_TOP_LOG_PROBS, check_allowed, check_count
from faser_trtllm.errors import FaserError
from faser_trtllm.serving.client import ResponseError
from faser_trtllm.serving.openai.chat.answer import Parsing
from faser_trtllm.serving.openai.chat.conversation import Conversation, read_conversation
from faser_trtllm.serving.openai.drafts.prediction import prediction_inputs
from faser_trtllm.serving.openai.error import RequestError, status_of
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown
from faser_trtllm.serving.openai.guide import guide_inputs
from faser_trtllm.serving.openai.served_model import PROMPT_TOKENS, Prompt, ServedModel, naming_length, too_long
from faser_trtllm.serving.text.request import MAX_STOP_WORDS, MAX_WORD_CHARS, TextRequest
from faser_trtllm.serving.triton.request import MAX_RETURN_SEQUENCES, SEED_STEP

MAX_PROMPTS = 64
MAX_SEQUENCES = 128
DEFAULT_MAX_TOKENS = 16

_ROWS = tuple(row for row in rows(TextRequest) if row.openai)
_COMMON = frozenset(
    (
        *(row.openai for row in _ROWS),
        *("model", "n", "stream", "stream_options", "logprobs", "logit_bias", "ignore_eos", "prediction"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    )
)
_COMPLETION = _COMMON | {"prompt", "best_of", "echo", "suffix"}
_CHAT = (_COMMON - {"parse_special_tokens"}) | {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
    *("reasoning_effort", "include_reasoning", "chat_template_kwargs", "functions", "function_call"),
    *("modalities", "audio", "web_search_options", "verbosity"),
}
_NAMES = {row.name: row.openai for row in _ROWS} | {"text_input": "prompt", "input_ids": "prompt"}
"""Field of the Triton model -> field of OpenAI's API."""

_IGNORED = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"))
"""Fields for the bookkeeping of OpenAI's service, which do not affect the answer."""

_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "insertion is not supported"),
    "functions": (([],), "it was replaced by tools"),
    "function_call": (("none", "auto"), "it was replaced by tool_choice"),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "web_search_options": ((), "searching the web is not supported"),
    "verbosity": (("medium",), "verbosity is not supported"),
}
"""Unsupported fields: the values that have no effect, and why others are refused."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The field stream_options."""

    include_usage: bool = False  # send the usage at the end of the stream
    usage_per_chunk: bool = False  # with every chunk as well
    include_obfuscation: bool | None = None  # pad events; None: as the server is configured


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for num_choices sequences per prompt."""

    prompts: tuple[Prompt, ...]
    num_choices: int
    inputs: Mapping[str, Any]  # inputs of the Triton model, except prompt and seed
    seed: int | None
    stream: bool
    options: StreamOptions
    logprobs: int | None  # number of alternatives per token; None: no log probs
    is_chat: bool
    echo: bool = False  # the answer begins with the prompt
    only_prompt: bool = False  # the answer ends with the prompt; the model makes the minimum of one token
    guide_field: str | None = None  # the client's field that constrains the output
    spec_decode_metrics: str = "none"  # one of records.LEVELS
    parsing: Parsing | None = None  # how to parse the answers; None: they are plain text

    def named(self, error: ResponseError) -> FaserError:
        """Return the model's error; if it is about a field, name the field as in this request."""
        if status_of(error) != 400 or error.field is None:
            return error
        names = _NAMES | {"guided_decoding_guide": self.guide_field or "guided_decoding_guide"}
        field = names.get(error.field, error.field)
        prompt = "messages" if self.is_chat else "prompt"
        if field == PROMPT_TOKENS:
            return too_long(error, prompt)
        if field == "prompt":
            field = prompt
        return RequestError(error.sentence(names), param=field if field in _COMPLETION | _CHAT else None)

    def sequences(self) -> list[tuple[Prompt, Mapping[str, Any]]]:
        """Return (prompt, inputs) of each choice. Seeds, and thus texts, are the same as with num_return_sequences."""
        found: list[tuple[Prompt, Mapping[str, Any]]] = []
        for prompt in self.prompts:
            for i in range(self.num_choices):
                seed = {} if self.seed is None else {"seed": (self.seed + i * SEED_STEP) % 2**64}
                found.append((prompt, {**self.inputs, **seed}))
        return found


def parse_completion(values: Mapping[str, Any], model: ServedModel) -> GenerationRequest:
    """Parse a body of /v1/completions; raise InvalidArgumentError."""
    fields = _checked_fields(values, _COMPLETION, model)
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOG_PROBS)
    prompts = _prompts(fields.get("prompt"))
    with naming_length("prompt"):
        for prompt in prompts:
            model.check_length(prompt, fields.flag("parse_special_tokens"))
    echo = fields.flag("echo")
    if echo and model.tokenizer is None and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("of token ids needs the tokenizer's files; start the server with --engine_dir", "echo")
    max_tokens = fields.integer("max_tokens", 0 if echo else 1)
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    return _request(fields, model, prompts, max_tokens, logprobs, echo=echo)


def parse_chat(values: Mapping[str, Any], model: ServedModel) -> GenerationRequest:
    """Parse a body of /v1/chat/completions; raise InvalidArgumentError. This can take long for long messages."""
    fields = _checked_fields(values, _CHAT, model)
    logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOG_PROBS) or 0
    if fields.flag("add_special_tokens"):
        raise RequestError("is true, but the chat template adds these tokens; leave it out", "add_special_tokens")
    if logprobs and not fields.flag("logprobs"):
        raise RequestError(f"is {logprobs} without logprobs; set logprobs to true", "top_logprobs")
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    limits = [fields.integer(name, 1) for name in names]
    if len(set(limits)) > 1:
        raise RequestError(f"is {limits[0]} and max_completion_tokens {limits[1]}; send one of them", "max_tokens")
    conversation = read_conversation(fields, model)
    max_tokens = limits[0] if limits else model.max_seq_len
    wanted = logprobs if fields.flag("logprobs") else None
    return _request(fields, model, (conversation.prompt,), max_tokens or DEFAULT_MAX_TOKENS, wanted, conversation)


def _checked_fields(values: Mapping[str, Any], known: frozenset[str], model: ServedModel) -> Fields:
    fields = Fields(values)
    fields.check_names(known | _IGNORED, _REFUSED)
    asked = fields.text("model")
    if asked is None:
        raise RequestError(f"is missing, send {model.name}", "model")
    if asked != model.name:
        raise unknown_model(asked, model.name)
    return fields


def unknown_model(name: str, served: str) -> RequestError:
    """Return the error, with HTTP status 404, of a request for a model that is not served."""
    return RequestError(
        f"{shown(name)} does not exist, this server has {served}", "model", status=404, reason="model_not_found"
    )


def _request(
    fields: Fields,
    model: ServedModel,
    prompts: tuple[Prompt, ...],
    max_tokens: int,
    logprobs: int | None,
    conversation: Conversation | None = None,
    echo: bool = False,
) -> GenerationRequest:
    if logprobs is not None and model.tokenizer is None:
        raise RequestError("needs the tokenizer's files; start the server with --engine_dir", "logprobs")
    num_choices = fields.integer("n", 1, MAX_RETURN_SEQUENCES) or 1
    if fields.get("best_of") is not None and fields.integer("best_of", 1, MAX_RETURN_SEQUENCES) != num_choices:
        raise RequestError(f"is {shown(fields.get('best_of'))}, allowed is the value of n", "best_of")
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise RequestError(
            f"is {num_choices} with {len(prompts)} prompts, in all {len(prompts) * num_choices} sequences, allowed are "
            f"at most {MAX_SEQUENCES}; send several requests",
            "n",
        )
    stream = fields.flag("stream")
    options = _stream_options(fields, stream)
    guide_field, guide = guide_inputs(fields) if conversation is None else (conversation.guide_field, {})
    inputs = _inputs(fields, max(1, max_tokens), None if conversation is None else conversation.turn_end)
    seed = inputs.pop("seed", None)
    metrics_level = model.spec_decode_metrics if len(prompts) * num_choices == 1 else "none"  # as in vLLM
    return GenerationRequest(
        prompts=prompts,
        num_choices=num_choices,
        inputs=inputs
        | guide
        | ({} if conversation is None else dict(conversation.inputs))
        | {"stream": stream, "exclude_input_in_output": True}
        | _log_prob_inputs(logprobs, echo, max_tokens)
        | ({"return_perf_metrics": True} if options.usage_per_chunk else {})
        | ({"return_acceptance": True} if metrics_level != "none" else {})
        | prediction_inputs(fields),
        seed=None if seed is None else seed % 2**64,
        stream=stream,
        options=options,
        logprobs=logprobs,
        is_chat=conversation is not None,
        echo=echo,
        only_prompt=max_tokens == 0,
        guide_field=guide_field,
        spec_decode_metrics=metrics_level,
        parsing=None if conversation is None else conversation.parsing,
    )


def _log_prob_inputs(logprobs: int | None, echo: bool, max_tokens: int) -> dict[str, Any]:
    if logprobs is None:
        return {}
    inputs: dict[str, Any] = {"return_log_probs": True, "num_top_log_probs": logprobs}
    if echo:
        inputs["return_context_log_probs"] = True
        if max_tokens <= 1:  # clients that score a prompt drop the last token, so there must be one, even an end token
            inputs["end_id"] = -1
    return inputs


def _inputs(fields: Fields, max_tokens: int, turn_end: str | None = None) -> dict[str, Any]:
    """Return the sampling inputs of the Triton model. turn_end: the text of an additional token to stop at."""
    found = {row.name: fields.row(row) for row in _ROWS if not row.is_list and row.name != "max_tokens"}
    if found["top_k"] == -1:  # vLLM's spelling of "off"
        found["top_k"] = 0
    found["allowed_token_ids"] = _allowed(fields.get("allowed_token_ids"))
    ignores_ends = fields.flag("ignore_eos")
    added = () if turn_end is None or ignores_ends else (turn_end,)
    stop = _stop(fields.get("stop"), MAX_STOP_WORDS - len(added)) + added
    found["stop_words"] = stop or None
    found["end_id"] = -1 if ignores_ends else None
    given = {name: value for name, value in found.items() if value is not None} | _logit_bias(fields)
    return {"temperature": 1.0, **given, "max_tokens": max_tokens}


def _allowed(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not _is_ids(value):
        raise RequestError("must be an array of token ids", "allowed_token_ids")
    check_allowed(value)
    return tuple(_checked_id("allowed_token_ids", token) for token in value)


def _logit_bias(fields: Fields) -> dict[str, Any]:
    value = fields.get("logit_bias")
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"is {kind_of(value)}; it must be an object of token ids and biases", "logit_bias")
    check_count("logit_bias", len(value), MAX_LOGIT_BIAS)
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise RequestError(f"has the key {shown(token)}; it must be a token id", "logit_bias")
    biases = Fields({f"logit_bias[{token}]": bias for token, bias in value.items()})
    values = [biases.number(name, Bounds(-100.0, 100.0)) for name in biases.names()]
    ids = [int(token) for token, bias in value.items() if bias is not None]
    return {"logit_bias_ids": ids, "logit_bias_values": values} if ids else {}


def _stream_options(fields: Fields, stream: bool) -> StreamOptions:
    options = fields.get("stream_options")
    if options is None:
        return StreamOptions()
    if not isinstance(options, dict):
        raise RequestError(f"is {kind_of(options)}; it must be an object", "stream_options")
    if not stream:
        raise RequestError("was sent without stream; set stream or leave it out", "stream_options")
    for name in options:
        if name not in _STREAM_OPTIONS:
            raise RequestError(f"has {shown(name)}, allowed are {', '.join(_STREAM_OPTIONS)}", "stream_options")
    flags = Fields({f"stream_options.{name}": value for name, value in options.items()})
    usage, each, padded = (flags.flag(f"stream_options.{name}") for name in _STREAM_OPTIONS)
    return StreamOptions(usage, each and usage, padded if "stream_options.include_obfuscation" in flags else None)


def _stop(value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    words = value if isinstance(value, list) else [value]
    check_count("stop", len(words), most)
    for word in words:
        if len(checked_text("stop", word)) > MAX_WORD_CHARS:
            raise RequestError(f"has {len(word)} characters, allowed are at most {MAX_WORD_CHARS}", "stop")
        if not word:
            raise RequestError("holds an empty string; leave it out", "stop")
    return tuple(words)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if value is None:
        raise RequestError("is missing, send a text or token ids", "prompt")
    if isinstance(value, str):
        return (_prompt(value),)
    if not isinstance(value, list) or not value:
        raise RequestError("must be a text, texts, token ids, or lists of token ids, and not empty", "prompt")
    if _is_ids(value):
        return (_prompt(value),)
    check_count("prompt", len(value), MAX_PROMPTS)
    return tuple(_prompt(entry) for entry in value)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str) and checked_text("prompt", value):
        return value
    if isinstance(value, list) and value and _is_ids(value):
        return tuple(_checked_id("prompt", token) for token in value)
    raise RequestError("must be a text, texts, token ids, or lists of token ids, and not empty", "prompt")


def _checked_id(name: str, token: int) -> int:
    if not 0 <= token <= MAX_INT32:
        raise RequestError(f"holds token id {shown(token)}, allowed is 0 or more", name)
    return token


def _is_ids(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)
