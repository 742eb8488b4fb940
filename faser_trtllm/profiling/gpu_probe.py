"""GPU engines on partitions, for a profile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost_table import ALL
from faser_trtllm.engine.opening import OpenRequest, open_engines
from faser_trtllm.partition.green_context import GpuPartition
from faser_trtllm.profiling.grid import MANY_REQUESTS, Limits
from faser_trtllm.profiling.probe import Probe, context_limits, largest_context, probe_draft_len
from faser_trtllm.sampling.rejection import RejectionSampler

MAX_ROWS = 1280
MAX_REQUESTS = 256


class GpuProbe(Probe):
    """Engines that move between named GPU partitions."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        sampler: RejectionSampler,
        partitions: Mapping[str, GpuPartition],
        limits: Limits,
        num_filled_slots: int,
        stack: ExitStack | None = None,
    ) -> None:
        """partitions: "all" and, where lanes are measured, "draft" and "verify"."""
        super().__init__(target, draft, sampler, limits, num_filled_slots, stack)
        self._places = partitions
        self.partitions = tuple(partitions)
        self.num_units = partitions[ALL].num_sms
        self.row_sizes = target.row_sizes

    def use(self, partition: str, engine: Any = None) -> None:
        for each in (self.target, self.draft) if engine is None else (engine,):
            if each is not None:
                each.use(self._places[partition])

    def wait(self, engine: Any) -> None:
        engine.wait()


def open_gpu_probe(engines: EngineDir, quick: bool, lanes: bool = False) -> GpuProbe:
    """The engines of a directory on the first GPU; lanes: of a quick profile, measured all the same. Raises as
    engine.opening.open_engines."""
    built = engines.build_config
    max_draft_len = max(1, built.max_draft_len)
    max_context, max_seq_len = context_limits(built.max_seq_len, max_draft_len, largest_context(quick))
    limits = Limits(
        max_rows=min(MAX_ROWS, built.max_num_tokens),
        max_num_requests=min(MAX_REQUESTS, built.max_batch_size),
        max_context=max_context,
        max_draft_len=built.max_draft_len,
    )
    num_slots = limits.max_num_requests
    needed = replace(
        built,
        max_batch_size=num_slots,
        max_num_tokens=max(limits.max_rows, num_slots),
        max_seq_len=max_seq_len,
        max_draft_len=probe_draft_len(max_draft_len),
    )
    num_blocks = num_slots * -(-max_seq_len // built.tokens_per_block)
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        overlap = lanes or not quick
        request = OpenRequest(engines, needed, num_blocks, drafting=engines.has_draft, overlap=overlap)
        opened = open_engines(request, stack)
        num_filled = min(num_slots, MANY_REQUESTS) if quick else num_slots
        probe = GpuProbe(opened.target, opened.draft, opened.sampler, opened.partitions, limits, num_filled, stack)
        guard.pop_all()
        return probe
