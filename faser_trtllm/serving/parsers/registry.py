"""Parsers by name, and by the chat template of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.parsers.event import OutputParser


def parser_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parsers of calls and of reasoning."""
    return (), ()


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """The parsers of calls and of reasoning that a chat template tells, None: it tells none."""
    return None, None


def reasoning_marks(reasoning_parser: str) -> tuple[str, str]:
    """What begins and ends the reasoning."""
    raise InvalidArgumentError(f"{reasoning_parser} is not known")


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Mapping[str, Any]],
    starts_in_reasoning: bool,
) -> OutputParser:
    """A parser for one answer."""
    raise InvalidArgumentError(f"{tool_parser or reasoning_parser} is not known")
