"""Reads the chat template's variables that a request sets: the reasoning effort, and others by name."""

from __future__ import annotations

import re
from typing import Any

from faser_trtllm.core.sampling_params import check_count
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import Fields, checked_text, kind_of, shown

MAX_ARGS = 32
MAX_ARG_CHARS = 4096
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_OWN = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now"),
    )
)


def template_args(fields: Fields) -> dict[str, Any]:
    """Read the fields `chat_template_kwargs` and `reasoning_effort`; raise InvalidArgumentError.

    As in vLLM, an effort also sets the variable enable_thinking, unless the request sets it.
    """
    args = _kwargs(fields.get("chat_template_kwargs"))
    effort = fields.get("reasoning_effort")
    if effort is None:
        return args
    if effort not in _EFFORTS:
        raise RequestError(f"is {shown(effort)}, allowed are {', '.join(_EFFORTS)}", "reasoning_effort")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | args


def _kwargs(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"is {kind_of(value)}; it must be an object of the template's variables", name)
    check_count(name, len(value), MAX_ARGS)
    for key, entry in value.items():
        if not _NAME.fullmatch(key) or key in _OWN:
            raise RequestError(f"has the name {shown(key)}, which is not valid or is set by the server", name)
        where = f"{name}.{key}"
        if isinstance(entry, dict | list):
            raise RequestError(f"is {kind_of(entry)}; it must be true, false, a number, a text or null", where)
        if isinstance(entry, str):
            check_count(where, len(checked_text(where, entry)), MAX_ARG_CHARS, "characters")
    return dict(value)
