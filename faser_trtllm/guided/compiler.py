"""Compile guides within limits of time and memory, and cache them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.core.guide import Guide
from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.guided.grammar import MAX_GROWTH_BYTES, Grammar, compile_source, open_tokenizer
from faser_trtllm.guided.probe import MAX_MEMORY_BYTES, Probe, Probed
from faser_trtllm.guided.spec import GUIDE_FIELD, GuideSpec
from faser_trtllm.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_TIMEOUT_S = 2.0
MAX_COMPILED_BYTES = 512 << 20
MAX_IDLE_BYTES = 32 << 20  # of cached guides while no request runs
_NICENESS = 5  # of the process in which compile() tries a guide
_MIN_GUIDE_BYTES = 1 << 20  # least size that counts: the allocator rounds, so small guides cannot be measured


@dataclass(frozen=True, slots=True)
class _Opened:
    tokenizer: LLTokenizer
    probe: Probe


class GuideCompiler:
    """Compiles for one tokenizer and caches the most recently used guides. Thread-safe; loads llguidance lazily.

    All guides that are cached or held by a request take at most MAX_COMPILED_BYTES, as measured by the probe. A guide
    grows by up to MAX_GROWTH_BYTES while it is used; this counts for cached guides only.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """vocab_size: number of logits that masks apply to. timeout_s: limit of a compilation's CPU time."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._guides: OrderedDict[GuideSpec, Grammar] = OrderedDict()
        self._num_bytes: weakref.WeakKeyDictionary[Grammar | Probed, int] = weakref.WeakKeyDictionary()
        self._opening = threading.Lock()
        self._opened: _Opened | None = None

    def find(self, spec: GuideSpec) -> Guide | None:
        """Return the guide if it is cached; never block on a compilation."""
        with self._lock:
            guide = self._guides.get(spec)
            if guide is None:
                return None
            if guide.has_failed:
                del self._guides[spec]
                return None
            self._guides.move_to_end(spec)
            return guide

    def compile(self, spec: GuideSpec) -> Guide:
        """Compile the guide; InvalidArgumentError if invalid or too costly, UnavailableError if no room is left."""
        guide = self.find(spec) or self._compile(spec, self._timeout_s, _NICENESS)
        if guide is None:
            raise InvalidArgumentError(
                f"takes more than {self._timeout_s:g} s or {MAX_MEMORY_BYTES >> 20} MiB to compile; simplify it",
                GUIDE_FIELD,
                limit=f"{self._timeout_s:g} s",
            )
        return guide

    def compile_quickly(self, spec: GuideSpec, budget_s: float) -> Guide | None:
        """Like compile(), but return None if it takes more than budget_s of CPU time or too much memory."""
        return self.find(spec) or self._compile(spec, min(budget_s, self._timeout_s))

    def release(self) -> None:
        """Drop guides that have grown or failed, and the oldest beyond MAX_IDLE_BYTES.

        Call it when no request runs, since they must be compiled again.
        """
        with self._lock:
            for spec in [spec for spec, guide in self._guides.items() if guide.has_grown or guide.has_failed]:
                del self._guides[spec]
            while sum(self._num_bytes[guide] for guide in self._guides.values()) > MAX_IDLE_BYTES:
                self._guides.popitem(last=False)

    def close(self) -> None:
        """End the probe's processes; compile() starts them again."""
        with self._opening:
            if self._opened is not None:
                self._opened.probe.close()

    def _compile(self, spec: GuideSpec, budget_s: float, niceness: int = 0) -> Guide | None:
        opened = self._open()
        probed = opened.probe.check(spec, budget_s, niceness)
        if probed is None:
            return None
        num_bytes = max(_MIN_GUIDE_BYTES, probed.num_bytes)
        with self._lock:
            self._make_room(num_bytes)
            self._num_bytes[probed] = num_bytes  # while it is compiled, so that no other thread takes the room
        matcher, error = compile_source(opened.tokenizer, probed.source)
        if error:
            raise InvalidArgumentError(f"is not a valid {spec.guide_type}: {error}", GUIDE_FIELD)
        guide = Grammar(matcher, opened.tokenizer.eos_tokens)
        with self._lock:
            self._guides[spec] = guide
            self._num_bytes[guide] = num_bytes
        return guide

    def _make_room(self, num_bytes: int) -> None:
        """Drop the oldest guides until a new one fits, or raise UnavailableError. The caller holds the lock."""
        while self._held_bytes() + num_bytes > MAX_COMPILED_BYTES:
            if not self._guides:
                raise UnavailableError(
                    f"the guides of running requests take more than {MAX_COMPILED_BYTES >> 20} MiB; try again later"
                )
            self._guides.popitem(last=False)

    def _held_bytes(self) -> int:
        num_grown = sum(guide.has_grown for guide in self._guides.values())
        return sum(self._num_bytes.values()) + MAX_GROWTH_BYTES * num_grown

    def _open(self) -> _Opened:
        with self._opening:
            if self._opened is None:
                definition, eos_token_ids = self._tokenizer.definition, self._tokenizer.eos_token_ids
                tokenizer = open_tokenizer(definition, self._vocab_size, eos_token_ids)
                self._opened = _Opened(tokenizer, Probe(definition, self._vocab_size, eos_token_ids))
            return self._opened
