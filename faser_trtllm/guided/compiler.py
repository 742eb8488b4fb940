"""Compile guides within limits of time and memory, and cache them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.core.guide import Guide
from faser_trtllm.errors import FaserError, InvalidArgumentError, UnavailableError
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
class _Size:
    num_bytes: int
    client_key: str  # of the client that had the guide compiled


@dataclass(frozen=True, slots=True)
class _Opened:
    tokenizer: LLTokenizer
    probe: Probe


class GuideCompiler:
    """Compiles for one tokenizer and caches the most recently used guides. Thread-safe; loads llguidance lazily.

    All guides that are cached or held by a request take at most MAX_COMPILED_BYTES, as measured by the probe; those of
    a named client take at most half of what the others leave. A guide grows by up to MAX_GROWTH_BYTES while it is used;
    this counts for cached guides only.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """vocab_size: number of logits that masks apply to. timeout_s: limit of a compilation's CPU time."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._guides: OrderedDict[GuideSpec, Grammar] = OrderedDict()  # cached, the least recently used first
        self._alive: weakref.WeakValueDictionary[GuideSpec, Grammar] = weakref.WeakValueDictionary()  # or held
        self._sizes: weakref.WeakKeyDictionary[Grammar | Probed, _Size] = weakref.WeakKeyDictionary()
        self._opening = threading.Lock()
        self._opened: _Opened | None = None

    def open(self) -> None:
        """Open the tokenizer, which holds Python's lock for up to a second, before there are requests to stop. Do
        nothing if guides are not possible; the requests that have one are told why."""
        with contextlib.suppress(FaserError):
            self._open()

    def find(self, spec: GuideSpec) -> Guide | None:
        """Return the guide if it is cached or held by a request; never block on a compilation."""
        with self._lock:
            guide = self._alive.get(spec)
            if guide is None or guide.has_failed:
                self._guides.pop(spec, None)
                return None
            self._guides[spec] = guide
            self._guides.move_to_end(spec)
            return guide

    def compile(self, spec: GuideSpec, client_key: str = "") -> Guide:
        """Compile the guide; InvalidArgumentError if invalid or too costly, UnavailableError if no room is left."""
        guide = self.find(spec) or self._compile(spec, client_key, self._timeout_s, _NICENESS)
        if guide is None:
            raise InvalidArgumentError(
                f"takes more than {self._timeout_s:g} s or {MAX_MEMORY_BYTES >> 20} MiB to compile; simplify it",
                GUIDE_FIELD,
                limit=f"{self._timeout_s:g} s",
            )
        return guide

    def compile_quickly(self, spec: GuideSpec, budget_s: float, client_key: str = "") -> Guide | None:
        """Like compile(), but return None if it takes more than budget_s of CPU time or too much memory."""
        return self.find(spec) or self._compile(spec, client_key, min(budget_s, self._timeout_s))

    def release(self) -> None:
        """Drop guides that have grown or failed, and the oldest beyond MAX_IDLE_BYTES.

        Call it when no request runs, since they must be compiled again.
        """
        with self._lock:
            for spec in [spec for spec, guide in self._guides.items() if guide.has_grown or guide.has_failed]:
                del self._guides[spec]
            while sum(self._sizes[guide].num_bytes for guide in self._guides.values()) > MAX_IDLE_BYTES:
                self._guides.popitem(last=False)

    def close(self) -> None:
        """End the probe's processes; compile() starts them again."""
        with self._opening:
            if self._opened is not None:
                self._opened.probe.close()

    def _compile(self, spec: GuideSpec, client_key: str, budget_s: float, niceness: int = 0) -> Guide | None:
        opened = self._open()
        probed = opened.probe.check(spec, budget_s, niceness)
        if probed is None:
            return None
        size = _Size(max(_MIN_GUIDE_BYTES, probed.num_bytes), client_key)
        with self._lock:
            self._make_room(size)
            self._sizes[probed] = size  # while it is compiled, so that no other thread takes the room
        matcher, error = compile_source(opened.tokenizer, probed.source)
        if error:
            raise InvalidArgumentError(f"is not a valid {spec.guide_type}: {error}", GUIDE_FIELD)
        guide = Grammar(matcher, opened.tokenizer.eos_tokens)
        with self._lock:
            self._guides[spec] = self._alive[spec] = guide
            self._sizes[guide] = size
        return guide

    def _make_room(self, size: _Size) -> None:
        """Drop cached guides until one of this size fits, the client's before others' and old ones first; raise
        UnavailableError if requests hold too many. The caller holds the lock."""
        is_other = {spec: self._sizes[guide].client_key != size.client_key for spec, guide in self._guides.items()}
        for spec in sorted(is_other, key=lambda spec: is_other[spec]):
            if size.num_bytes <= self._room(size.client_key):
                return
            del self._guides[spec]
        if size.num_bytes > self._room(size.client_key):
            limit = f"{MAX_COMPILED_BYTES >> 20} MiB"
            if size.client_key:
                limit = f"the share of their client, half of what others leave of {limit}"
            raise UnavailableError(f"the guides of running requests take more than {limit}; try again later")

    def _room(self, client_key: str) -> int:
        """Return the bytes that a client's next guide may take."""
        grown = {guide for guide in self._guides.values() if guide.has_grown}
        own = others = 0
        for guide, size in self._sizes.items():
            num_bytes = size.num_bytes + MAX_GROWTH_BYTES * (guide in grown)
            if client_key and size.client_key == client_key:
                own += num_bytes
            else:
                others += num_bytes
        left = MAX_COMPILED_BYTES - others
        return left // 2 - own if client_key else left

    def _open(self) -> _Opened:
        with self._opening:
            if self._opened is None:
                definition, eos_token_ids = self._tokenizer.definition, self._tokenizer.eos_token_ids
                tokenizer = open_tokenizer(definition, self._vocab_size, eos_token_ids)
                self._opened = _Opened(tokenizer, Probe(definition, self._vocab_size, eos_token_ids))
            return self._opened
