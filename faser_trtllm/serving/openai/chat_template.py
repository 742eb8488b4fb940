"""Renders messages to prompt tokens with a model's chat template, in Jinja's sandbox."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from faser_trtllm.errors import ConfigError, FaserError
from faser_trtllm.models.config import read_json
from faser_trtllm.models.tokenizer import TOKENIZER_FILE, Tokenizer
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.mixed_text import MixedText, alternatives

MAX_TEMPLATE_BYTES = 256 << 10
MAX_PROMPT_CHARS = 8 << 20
_MAX_MARK_CHARS = 256
_TEMPLATE_FILE = "chat_template.jinja"
_SETTINGS_FILE = "tokenizer_config.json"
_NOTHING = "(?!)"  # a regex that matches nowhere
_THINKING = ("<think>", "</think>")
_ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


class ChatTemplate:
    """A template in Hugging Face's dialect, with its tokenizer. Immutable, so threads may share it."""

    def __init__(self, source: str, tokenizer: Tokenizer, special_tokens: Sequence[str] = (), **names: str) -> None:
        """Raise ConfigError if the template is too long or invalid.

        special_tokens: added tokens whose names are plain text inside messages. names: variables such as bos_token.
        """
        num_bytes = len(source.encode())
        if num_bytes > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"the chat template has {num_bytes} bytes, allowed are at most {MAX_TEMPLATE_BYTES}")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid: {error}") from error
        self.source = source
        self._tokenizer = tokenizer
        self._names = names
        hidden = [token for token in special_tokens if tokenizer.token_id(token) is not None]
        self._text = MixedText(tokenizer, hidden)
        self._hidden = re.compile(alternatives(hidden) or _NOTHING)
        self._hidden_in_answers = re.compile(alternatives([t for t in hidden if t not in _THINKING]) or _NOTHING)

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer, path: Path | None = None) -> ChatTemplate | None:
        """Load the template from a tokenizer's directory, or from `path`; None if there is none. Raises ConfigError."""
        settings_path = directory / _SETTINGS_FILE
        settings = read_json(settings_path) if settings_path.exists() else {}
        source = _read(path) if path is not None else _find_source(directory, settings)
        if source is None:
            return None
        names = {}
        for kind in ("bos", "eos", "unk", "pad"):
            token = settings.get(f"{kind}_token")
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                names[f"{kind}_token"] = content
        added = read_json(directory / TOKENIZER_FILE).get("added_tokens", [])
        hidden = [t["content"] for t in added if t.get("special") or _writes(source, t["content"])]
        return cls(source, tokenizer, hidden, **names)

    def encode(
        self,
        messages: Sequence[Message],
        check: Callable[[str], None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the conversation, up to the start of the assistant's answer.

        Only the template can produce special tokens and other tokens that it writes. If a message spells one out, it
        stays plain text, so that no message can forge a turn. Reasoning marks in the assistant's messages are not
        changed, since templates search for them. Raises RequestError if the template refuses the messages.

        check: called with the text before it is tokenized; may raise.
        tools: functions that the assistant may call.
        args: further variables of the template.
        """
        marks: list[str] = []
        nonce = secrets.token_hex(8)

        def hide(match: re.Match[str]) -> str:
            marks.append(match[0])
            return f"\ue000{nonce}.{len(marks) - 1}\ue001"

        def hidden(value: Any, names: re.Pattern[str]) -> Any:
            return _with_texts(value, lambda text: names.sub(hide, text))

        variables = hidden(dict(args or {}), self._hidden)
        variables["tools"] = None if tools is None else hidden(list(tools), self._hidden)
        variables["messages"] = [
            hidden(message, self._hidden_in_answers if message["role"] == "assistant" else self._hidden)
            for message in messages
        ]
        text = self._render(variables)
        # Pieces with odd index are marks.
        pieces = re.split(f"\ue000{nonce}\\.(\\d+)\ue001", text) if marks else [text]
        pieces[1::2] = [marks[int(piece)] for piece in pieces[1::2]]
        if check is not None:
            check("".join(pieces))
        return self._text.encode(pieces)

    @functools.cached_property
    def turn_end(self) -> str | None:
        """The special token that the template writes right after an answer, or None if that cannot be determined."""
        answer = secrets.token_hex(8)
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            text = self._render({"messages": messages, "tools": None}, is_asking=False)
        except FaserError:
            return None
        _, _, rest = text.rpartition(answer)
        rest = rest.lstrip()[:_MAX_MARK_CHARS] if len(rest) < len(text) else ""
        ids = self._tokenizer.encode(rest, add_special_tokens=False, parse_special_tokens=True)
        token = self._tokenizer.token(ids[0]) if ids else None
        return token if token is not None and self._tokenizer.is_special(token) else None

    def _render(self, variables: Mapping[str, Any], is_asking: bool = True) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, **self._names, "add_generation_prompt": is_asking}):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise RequestError(
                        f"has more than {MAX_PROMPT_CHARS} characters; shorten the messages", "prompt", param="messages"
                    )
                pieces.append(piece)
        except RequestError:
            raise
        except SecurityError as error:
            raise ConfigError(f"the chat template does what the sandbox forbids: {_one_line(error)}") from error
        except Exception as error:  # a template may raise anything on unexpected messages
            raise RequestError(
                f"the chat template refuses the messages: {_one_line(error)}", param="messages"
            ) from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without operators that can make huge values from small ones."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise SecurityError(f"the operator {operator} on these values")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """The block {% generation %}, which marks the assistant's text for training; only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _writes(source: str, token: str) -> bool:
    """Return True if a template writes the token, also around a role, as in '<|' + message.role + '|>'."""
    spellings = [[token], *(token.split(role) for role in _ROLES if role in token)]
    return bool(token.strip()) and any(all(part in source for part in parts) for parts in spellings)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its texts changed, including field names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _with_texts(entry, change) for name, entry in value.items()}
    return [_with_texts(entry, change) for entry in value] if isinstance(value, list) else value


def _find_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    if (directory / _TEMPLATE_FILE).exists():
        return _read(directory / _TEMPLATE_FILE)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"chat_template in {_SETTINGS_FILE} is not a string; pass a file with --chat_template")
    return found


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"chat_template {path} has {path.stat().st_size} bytes, allowed are at most {MAX_TEMPLATE_BYTES}"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path} cannot be read: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Call json.dumps, since Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
