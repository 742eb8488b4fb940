"""Compiles guides from their specs and caches them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from faser_trtllm.core.guide import Guide
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.guided.grammar import Grammar, compile_source, open_tokenizer
from faser_trtllm.guided.probe import Probe
from faser_trtllm.guided.spec import GUIDE_FIELD, GuideSpec
from faser_trtllm.models.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 10.0
MAX_CACHED_GUIDES = 32


class GuideCompiler:
    """Compiles for one tokenizer and caches the most recently used guides. Thread-safe; loads llguidance lazily."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """vocab_size: of the model's logits, to which the masks are applied."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._guides: OrderedDict[GuideSpec, Guide] = OrderedDict()
        self._lock = threading.Lock()
        self._compile: Callable[[GuideSpec], Guide] | None = None
        self._compiling = threading.Lock()
        self._probe: Probe | None = None

    def find(self, spec: GuideSpec) -> Guide | None:
        """The guide if it is cached; never blocks."""
        with self._lock:
            guide = self._guides.get(spec)
            if guide is not None:
                self._guides.move_to_end(spec)
            return guide

    def compile(self, spec: GuideSpec) -> Guide:
        """Compile the guide, within about COMPILE_TIMEOUT_S; raises InvalidArgumentError if that fails."""
        with self._compiling:
            guide = self.find(spec)
            if guide is None:
                if self._compile is None:
                    self._compile = self._open()
                guide = self._compile(spec)
                with self._lock:
                    self._guides[spec] = guide
                    if len(self._guides) > MAX_CACHED_GUIDES:
                        self._guides.popitem(last=False)
            return guide

    def close(self) -> None:
        """End the probe process; compile() restarts it."""
        with self._compiling:
            if self._probe is not None:
                self._probe.close()

    def _open(self) -> Callable[[GuideSpec], Guide]:
        definition, eos_token_ids = self._tokenizer.definition, self._tokenizer.eos_token_ids
        tokenizer = open_tokenizer(definition, self._vocab_size, eos_token_ids)
        eos_tokens = tuple(tokenizer.eos_tokens)
        probe = self._probe = Probe(definition, self._vocab_size, eos_token_ids, self._timeout_s)

        def compile_spec(spec: GuideSpec) -> Guide:
            matcher, error = compile_source(tokenizer, probe.check(spec))
            if error:
                raise InvalidArgumentError(f"is not a valid {spec.guide_type}: {error}", GUIDE_FIELD)
            return Grammar(matcher, eos_tokens)

        return compile_spec
