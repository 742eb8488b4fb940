"""Translates OpenAI's completion and chat requests to inputs of the Triton model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faser_trtllm.core.sampling_params import MAX_LOGIT_BIAS, MAX_TOP_LOG_PROBS
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.error import ModelError, RequestError, named
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown
from faser_trtllm.serving.openai.guide import guide_inputs
from faser_trtllm.serving.text.request import MAX_STOP_WORDS, MAX_WORD_CHARS
from faser_trtllm.serving.triton.request import MAX_RETURN_SEQUENCES, SEED_STEP

if TYPE_CHECKING:
    from faser_trtllm.serving.openai.chat_template import ChatTemplate

MAX_PROMPTS = 64
MAX_SEQUENCES = 128
MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 1024
DEFAULT_MAX_TOKENS = 16
_MAX_INT32 = 2**31 - 1

Prompt = str | tuple[int, ...]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_COMMON = frozenset(
    (
        *("model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "logprobs"),
        *("presence_penalty", "frequency_penalty", "logit_bias"),
        # Not OpenAI's; named as in vLLM, or as the inputs of the Triton model.
        *("top_k", "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "num_draft_tokens", "timeout_ms"),
        "drafters",  # with commas between them
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    )
)
_COMPLETION = _COMMON | {"prompt", "best_of", "echo", "suffix"}
_CHAT = _COMMON | {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "functions"),
    *("function_call", "modalities", "audio", "web_search_options", "reasoning_effort", "verbosity"),
}
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
"""Fields for the bookkeeping of OpenAI's service; they do not affect the answer."""

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "insertion is not supported"),
    "tool_choice": (("none", "auto"), "tools are not supported"),
    "functions": (([],), "tools are not supported"),
    "function_call": (("none", "auto"), "tools are not supported"),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "web_search_options": ((), "searching the web is not supported"),
    "reasoning_effort": (("none",), "reasoning efforts are not supported"),
    "verbosity": (("medium",), "verbosity is not supported"),
}
"""Unsupported fields: the values that have no effect, and why others are refused."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are parsed for.

    tokenizer: None if its files are unavailable; then chat and logprobs are refused. max_seq_len: None if unknown.
    """

    name: str
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    max_seq_len: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request: num_choices sequences per prompt. inputs: of the Triton model, except prompt and seed.

    logprobs: how many of the most probable tokens stand beside each token's, None: no log probs. echo: the answer
    begins with the prompt. only_prompt: it ends there; the model is asked for one token, since it gives no less.
    guide_field: the field that constrains the output.
    """

    prompts: tuple[Prompt, ...]
    num_choices: int
    inputs: Mapping[str, Any]
    seed: int | None
    stream: bool
    include_usage: bool
    usage_per_chunk: bool
    logprobs: int | None
    is_chat: bool
    echo: bool = False
    only_prompt: bool = False
    guide_field: str | None = None

    def named(self, error: ModelError) -> ModelError:
        """The model's error with the names of this request's fields."""
        return named(error, _COMPLETION | _CHAT, guide_field=self.guide_field, is_chat=self.is_chat)

    def sequences(self) -> list[tuple[Prompt, Mapping[str, Any]]]:
        """Prompt and inputs of each choice, by index.

        Seeds are those of the Triton model's num_return_sequences, so both give the same texts.
        """
        found: list[tuple[Prompt, Mapping[str, Any]]] = []
        for prompt in self.prompts:
            for i in range(self.num_choices):
                seed = {} if self.seed is None else {"seed": (self.seed + i * SEED_STEP) % 2**64}
                found.append((prompt, {**self.inputs, **seed}))
        return found


def parse_completion(values: Mapping[str, Any], model: ServedModel) -> GenerationRequest:
    """A body of /v1/completions; raises RequestError."""
    fields = _checked_fields(values, _COMPLETION, model)
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOG_PROBS)
    prompts = _prompts(fields.get("prompt"))
    echo = fields.flag("echo")
    if echo and model.tokenizer is None and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("echo of token ids needs the tokenizer's files; start the server with --engine_dir", "echo")
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, _MAX_INT32)
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    return _request(fields, model, prompts, max_tokens, logprobs, is_chat=False, echo=echo)


def parse_chat(values: Mapping[str, Any], model: ServedModel) -> GenerationRequest:
    """A body of /v1/chat/completions; raises RequestError. May take long for long messages."""
    fields = _checked_fields(values, _CHAT, model)
    logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOG_PROBS) or 0
    if logprobs and not fields.flag("logprobs"):
        raise RequestError(f"top_logprobs is {logprobs} without logprobs; set logprobs to true", "top_logprobs")
    _check_tools(fields)
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    limits = [fields.integer(name, 1, _MAX_INT32) for name in names]
    if len(set(limits)) > 1:
        raise RequestError(
            f"max_tokens is {limits[0]} and max_completion_tokens {limits[1]}; send one of them", "max_tokens"
        )
    messages = _messages(fields.get("messages"))
    if model.chat_template is None:
        raise RequestError(
            f"model {model.name} has no chat template; start the server with --engine_dir and --chat_template, or use "
            "/v1/completions",
            "messages",
        )
    prompt = tuple(model.chat_template.encode(messages))
    if not prompt:
        raise RequestError("messages render to an empty prompt; send a message with content", "messages")
    max_tokens = limits[0] if limits else model.max_seq_len
    wanted = logprobs if fields.flag("logprobs") else None
    return _request(fields, model, (prompt,), max_tokens or DEFAULT_MAX_TOKENS, wanted, is_chat=True)


def _check_tools(fields: Fields) -> None:
    """Tools are for a client's bookkeeping only: with tool_choice none the model answers in text, as it does here."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if tools and not isinstance(tools, list):
        raise RequestError(f"tools is {kind_of(tools)}, it must be a list", "tools")
    if tools and choice != "none":
        raise RequestError(
            f"tools was sent with tool_choice {shown(choice or 'auto')}, allowed is none: the model calls no tools; "
            "describe the answer with response_format instead",
            "tools",
        )


def _checked_fields(values: Mapping[str, Any], known: frozenset[str], model: ServedModel) -> Fields:
    fields = Fields(values)
    for name in fields.names():
        if name in _IGNORED:
            continue
        if name not in known:
            raise RequestError(f"{shown(name)} is not a field of this request; leave it out", name[:100])
        harmless, why = _REFUSED.get(name, (None, ""))
        if harmless is not None and fields.get(name) not in harmless:
            raise RequestError(f"{name} was sent, but {why}; leave it out", name)
    asked = fields.text("model")
    if asked is None:
        raise RequestError(f"model is missing, send {model.name}", "model")
    if asked != model.name:
        raise unknown_model(asked, model.name)
    return fields


def unknown_model(name: str, served: str) -> RequestError:
    return RequestError(
        f"model {shown(name)} does not exist, this server has {served}", "model", status=404, reason="model_not_found"
    )


def _request(
    fields: Fields,
    model: ServedModel,
    prompts: tuple[Prompt, ...],
    max_tokens: int,
    logprobs: int | None,
    is_chat: bool,
    echo: bool = False,
) -> GenerationRequest:
    if logprobs is not None and model.tokenizer is None:
        raise RequestError("logprobs needs the tokenizer's files; start the server with --engine_dir", "logprobs")
    num_choices = fields.integer("n", 1, MAX_RETURN_SEQUENCES) or 1
    if fields.get("best_of") is not None and fields.integer("best_of", 1, MAX_RETURN_SEQUENCES) != num_choices:
        raise RequestError(f"best_of is {shown(fields.get('best_of'))}, allowed is the value of n", "best_of")
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts with n {num_choices} are {len(prompts) * num_choices} sequences, allowed are at "
            f"most {MAX_SEQUENCES}; send several requests",
            "n",
        )
    stream = fields.flag("stream")
    include_usage, usage_per_chunk = _usage_options(fields, stream)
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    guide_field, guide = guide_inputs(fields)
    return GenerationRequest(
        prompts=prompts,
        num_choices=num_choices,
        inputs=_inputs(fields, max(1, max_tokens))
        | guide
        | {"stream": stream, "exclude_input_in_output": True}
        | _log_prob_inputs(logprobs, echo, max_tokens)
        | ({"return_perf_metrics": True} if usage_per_chunk else {}),
        seed=None if seed is None else seed % 2**64,
        stream=stream,
        include_usage=include_usage,
        usage_per_chunk=usage_per_chunk,
        logprobs=logprobs,
        is_chat=is_chat,
        echo=echo,
        only_prompt=max_tokens == 0,
        guide_field=guide_field,
    )


def _log_prob_inputs(logprobs: int | None, echo: bool, max_tokens: int) -> dict[str, Any]:
    if logprobs is None:
        return {}
    inputs: dict[str, Any] = {"return_log_probs": True, "num_top_log_probs": logprobs}
    if echo:
        inputs["return_context_log_probs"] = True
        if max_tokens <= 1:  # who scores a prompt cuts one token off at the end: an end token has to be there, too
            inputs["end_id"] = -1
    return inputs


def _inputs(fields: Fields, max_tokens: int) -> dict[str, Any]:
    """The Triton model's sampling inputs. OpenAI samples at temperature 1 unless told otherwise, the model does not."""
    temperature = fields.number("temperature", 0.0, 2.0)
    optional = {
        "top_p": fields.number("top_p", 0.0, 1.0),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "top_k": fields.integer("top_k", -1, _MAX_INT32),
        "min_tokens": fields.integer("min_tokens", 0, _MAX_INT32),
        "presence_penalty": fields.number("presence_penalty", -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", -2.0, 2.0),
        "repetition_penalty": fields.number("repetition_penalty", 0.0, 100.0),
        "num_draft_tokens": fields.integer("num_draft_tokens", 0, _MAX_INT32),
        "drafters": fields.text("drafters"),
        "timeout_ms": fields.number("timeout_ms", 1.0, 86_400_000.0),
        "stop_words": _stop(fields.get("stop")) or None,
        "end_id": -1 if fields.flag("ignore_eos") else None,
    }
    if optional["top_k"] == -1:  # vLLM's spelling of "off"
        optional["top_k"] = 0
    inputs = {name: value for name, value in optional.items() if value is not None} | _logit_bias(fields)
    return inputs | {"max_tokens": max_tokens, "temperature": 1.0 if temperature is None else temperature}


def _logit_bias(fields: Fields) -> dict[str, Any]:
    value = fields.get("logit_bias")
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RequestError(
            f"logit_bias is {kind_of(value)}, it must be an object of token ids and biases", "logit_bias"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(value)} entries, allowed are at most {MAX_LOGIT_BIAS}", "logit_bias")
    biases = Fields(value)
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise RequestError(f"logit_bias has the key {shown(token)}, it must be a token id", "logit_bias")
    ids = [int(token) for token in biases.names()]
    try:
        values = [biases.number(token, -100.0, 100.0) for token in biases.names()]
    except RequestError as error:
        raise RequestError(f"logit_bias of token {error}", "logit_bias") from error
    return {"logit_bias_ids": ids, "logit_bias_values": values} if ids else {}


def _usage_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether to send the usage at the end, and with every chunk too."""
    options = fields.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is {kind_of(options)}, it must be an object", "stream_options")
    if not stream:
        raise RequestError("stream_options was sent without stream; set stream or leave it out", "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise RequestError(
                f"stream_options has {shown(name)}, allowed are include_usage and continuous_usage_stats",
                "stream_options",
            )
    flags = Fields({f"stream_options.{name}": value for name, value in options.items()})
    include_usage = flags.flag("stream_options.include_usage")
    return include_usage, flags.flag("stream_options.continuous_usage_stats") and include_usage


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    words = value if isinstance(value, list) else [value]
    if len(words) > MAX_STOP_WORDS:
        raise RequestError(f"stop has {len(words)} entries, allowed are at most {MAX_STOP_WORDS}", "stop")
    for word in words:
        if len(checked_text("stop", word)) > MAX_WORD_CHARS:
            raise RequestError(f"stop has {len(word)} characters, allowed are at most {MAX_WORD_CHARS}", "stop")
        if not word:
            raise RequestError("stop holds an empty string; leave it out", "stop")
    return tuple(words)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if value is None:
        raise RequestError("prompt is missing, send a text or token ids", "prompt")
    if isinstance(value, str):
        return (_prompt(value),)
    if not isinstance(value, list) or not value:
        raise RequestError("prompt must be a text, texts, token ids, or lists of token ids, and not empty", "prompt")
    if _is_ids(value):
        return (_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(value)} entries, allowed are at most {MAX_PROMPTS}", "prompt")
    return tuple(_prompt(entry) for entry in value)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str) and checked_text("prompt", value):
        return value
    if isinstance(value, list) and value and _is_ids(value):
        for token in value:
            if not 0 <= token <= _MAX_INT32:
                raise RequestError(f"prompt holds token id {shown(token)}, allowed is 0 or more", "prompt")
        return tuple(value)
    raise RequestError("prompt must be a text, texts, token ids, or lists of token ids, and not empty", "prompt")


def _is_ids(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)


def _messages(value: Any) -> list[dict[str, str]]:
    if value is None:
        raise RequestError("messages is missing, send a list of messages", "messages")
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list of at least one message", "messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(value)} entries, allowed are at most {MAX_MESSAGES}", "messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} is {kind_of(value)}, it must be an object with role and content", "messages")
    fields = Fields(value)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {shown(role)}, allowed are {', '.join(_ROLES)}", "messages")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.get(name):
            raise RequestError(f"{where}.{name} was sent, but only text is supported; leave it out", "messages")
    message = {"role": _ROLES[role], "content": _content(f"{where}.content", fields.get("content"))}
    if "name" in fields:
        message["name"] = checked_text(f"{where}.name", fields.get("name"))
    return message


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return checked_text(where, value)
    if not isinstance(value, list) or not value or len(value) > MAX_CONTENT_PARTS:
        raise RequestError(
            f"{where} is {kind_of(value)}, it must be a text or 1 to {MAX_CONTENT_PARTS} text parts",
            "messages",
        )
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"{where} has a part of type {shown(kind)}, allowed is text", "messages")
        texts.append(checked_text(where, part.get("text")))
    return "".join(texts)
