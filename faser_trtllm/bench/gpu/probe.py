"""The passes that steps and cost tables time, on the engines of a pair."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from faser_trtllm.bench.gpu.cuda_engines import TOKENS_PER_BLOCK
from faser_trtllm.bench.gpu.pair import Pair
from faser_trtllm.profiling.grid import Limits
from faser_trtllm.profiling.probe import DRAFTED, Probe
from faser_trtllm.sampling.table import SamplingTable


class PairProbe(Probe):
    """A Probe over engines that are open already and stay open."""

    def __init__(self, pair: Pair, context_len: int) -> None:
        """context_len: tokens in the cache of every request, in every pass."""
        limits = pair.limits
        longest = min(context_len, limits.max_seq_len - max(limits.max_draft_len + 1, DRAFTED) - 1)
        self._stack = ExitStack()
        self._places = pair.engines.places
        self.core_sets = dict.fromkeys(self._places, _Anywhere())  # type: ignore[arg-type]
        self.limits = Limits(
            max_rows=limits.max_num_tokens,
            max_num_requests=limits.max_batch_size,
            max_context=longest,
            max_draft_len=limits.max_draft_len,
        )
        blocks_per_seq = -(-limits.max_seq_len // TOKENS_PER_BLOCK)
        table = np.arange(limits.max_batch_size * blocks_per_seq, dtype=np.int32)
        self._table = table.reshape(limits.max_batch_size, blocks_per_seq)
        self.target, self.draft = pair.target, pair.draft  # type: ignore[assignment]
        vocab_size = pair.target.spec.vocab_size
        self._tokens = np.random.default_rng(0).integers(1, vocab_size, limits.max_seq_len, dtype=np.int32)
        self._max_draft_len = max(DRAFTED, limits.max_draft_len)
        self._drafting, self._testing = (
            SamplingTable(limits.max_batch_size, vocab_size, self._max_draft_len) for _ in range(2)
        )
        self._tester = pair.engines.tester  # type: ignore[assignment]
        self._uniform = np.float32(1.0 / vocab_size)

    def use(self, partition: str, engine: Any = None) -> None:
        for each in (self.target, self.draft) if engine is None else (engine,):
            each.use(self._places[partition])  # type: ignore[union-attr, arg-type]


class _Anywhere:
    """In the place of a core set: the host's threads are not bound to cores."""

    def pin_caller(self) -> None:
        """Nothing to bind."""
