"""Compile guides to llguidance grammars, and fill masks over the model's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.guide import GuideError
from faser_trtllm.errors import InvalidArgumentError, install
from faser_trtllm.guided.spec import GuideSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MISSING = f"guided decoding needs llguidance, which is not installed here; run {install('guided')}"
_ANY_JSON = '{"type": ["object", "array"]}'
# Without a limit, a small model may write nothing but white space; 32 characters leave room for deep indentation. White
# space is optional in the grammar anyway, so the pattern does not allow the empty text, with which the library would
# consider far more readings of a token.
WHITE_SPACE = r"[ \t\r\n]{1,32}"
_MAX_REASON_CHARS = 200
_FEW_MASKS = 50  # masks in which the lexer of an exploding regex grows by 1 MiB
_MAX_LEXER_STATES = 20_000
MAX_GROWTH_BYTES = 16 << 20  # of a lexer with _MAX_LEXER_STATES


class Grammar:
    """A grammar that is compiled for one tokenizer; a Guide (core/guide.py).

    All its states share one lexer, whose automaton grows with the texts that it meets. If the lexer is full or has once
    run out of fuel, all states fail from then on.

    has_failed: a state failed, maybe because of the lexer. num_masks: masks that were filled.
    """

    def __init__(self, matcher: LLMatcher, eos_tokens: Sequence[int]) -> None:
        self.has_failed = False
        self.num_masks = 0
        self._matcher = matcher
        self._eos_tokens = tuple(eos_tokens)

    def start(self, end_ids: Sequence[int]) -> GrammarState:
        return GrammarState(self, self._matcher.deep_copy(), self._eos_tokens, end_ids)

    @property
    def has_grown(self) -> bool:
        """True if the lexer may have grown by more than 1 MiB, up to MAX_GROWTH_BYTES."""
        return self.num_masks > _FEW_MASKS


class GrammarState:
    """A GuideState with its own matcher. Texts end with the request's end ids, not with the tokenizer's."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, eos_tokens: Sequence[int], end_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._never = sorted({*eos_tokens, *end_ids})
        self._end_ids = end_ids

    def advance(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._error()

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        matcher = self._matcher
        self._grammar.num_masks += 1
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise self._error()
        for token in self._never:
            mask[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        if matcher.is_accepting():
            for token in self._end_ids:
                mask[token // 32] |= np.uint32(1 << token % 32)

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def _error(self) -> GuideError:
        self._grammar.has_failed = True
        reason = _reason(self._matcher)
        return GuideError(f"guided_decoding_guide cannot be followed further ({reason}); simplify it")


def open_tokenizer(definition: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Open llguidance's tokenizer from the text of tokenizer.json; raise InvalidArgumentError if that fails."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise InvalidArgumentError(MISSING) from error
    try:
        return LLTokenizer(definition, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # the library raises ValueError and others
        raise InvalidArgumentError(
            f"guided decoding does not work with this tokenizer ({shortened(str(error))}); leave the guide out"
        ) from error


def source_of(spec: GuideSpec) -> str:
    """Translate a guide to llguidance's format; ValueError or RecursionError for some invalid guides."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if spec.guide_type == "regex":
        return LLMatcher.grammar_from_regex(spec.guide)
    if spec.guide_type == "ebnf_grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(spec.guide))
    schema = spec.guide if spec.guide_type == "json_schema" else _ANY_JSON
    return LLMatcher.grammar_from_json_schema(schema, defaults=_json_defaults(schema))


def _json_defaults(schema: str) -> JsonCompileOptions | None:
    own = json.loads(schema)  # its errors count columns in the schema, the library's in a wrapper of it
    says = own.get("x-guidance") if isinstance(own, dict) else None
    # The library would prefer our pattern to the schema's own whitespace_flexible.
    return None if isinstance(says, dict) and "whitespace_flexible" in says else {"whitespace_pattern": WHITE_SPACE}


def compile_source(tokenizer: LLTokenizer, source: str) -> tuple[LLMatcher, str]:
    """Compile a grammar; return the matcher and an error, "" if none. Releases the GIL; may take long."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    return matcher, shortened(matcher.get_error()) if matcher.is_error() else ""


def first_token_error(matcher: LLMatcher) -> str:
    """Compute the first mask; return why that fails within the limits, "" if it does not. May take long."""
    matcher.compute_bitmask()
    return _reason(matcher) if matcher.is_error() else ""


def _reason(matcher: LLMatcher) -> str:
    reason = shortened(matcher.get_error())
    return "no continuation is allowed" if reason == "NoExtensionBias" else reason


def shortened(reason: str) -> str:
    """Shorten the library's error message to a clause: its first line and the details, without a full stop."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    details = [line for line in lines if line.startswith("error:")]  # a regex error shows the regex first
    first = "; ".join([lines[0].split("(in regex)")[0].strip(), *details]) if lines else "no reason given"
    return first[:_MAX_REASON_CHARS].rstrip(".:; ")


def _limits() -> LLParserLimits:
    """Return limits below the library's defaults, because all requests wait while a mask is computed."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=20_000,
        step_max_items=10_000,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=16_000,
        verbose_errors=False,
    )
