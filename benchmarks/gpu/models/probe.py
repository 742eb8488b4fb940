"""The timed passes of steps and cost tables on a pair's engines."""

from __future__ import annotations

from benchmarks.gpu.models.pair import OpenPair
from faser_trtllm.profiling.gpu_probe import GpuProbe
from faser_trtllm.profiling.grid import Limits
from faser_trtllm.profiling.probe import context_limits


class PairProbe(GpuProbe):
    """A probe of engines that are already open and stay open."""

    def __init__(self, pair: OpenPair, context_len: int) -> None:
        """Create a probe; context_len: cached tokens of every request in every pass."""
        sizes = pair.limits
        longest, _ = context_limits(sizes.max_seq_len, sizes.max_draft_len, context_len)
        limits = Limits(
            max_rows=sizes.max_num_tokens,
            max_num_requests=sizes.max_batch_size,
            max_context=longest,
            max_draft_len=sizes.max_draft_len,
        )
        engines = pair.engines
        super().__init__(pair.target, pair.draft, engines.sampler, engines.partitions, limits, sizes.max_batch_size)
