"""Open a directory's GPU engines on partitions, for a profile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost_table import ALL
from faser_trtllm.engine.opening import OpenRequest, open_engines
from faser_trtllm.partition.green_context import GpuPartition
from faser_trtllm.profiling.grid import MANY_REQUESTS, Limits
from faser_trtllm.profiling.probe import Probe, probe_sizes
from faser_trtllm.sampling.rejection import RejectionSampler

MAX_ROWS = 1280
MAX_REQUESTS = 256


class GpuProbe(Probe):
    """A probe of engines that move between named GPU partitions."""

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
        """Create a probe. partitions: the places of Probe, by name."""
        super().__init__(target, draft, sampler, partitions, limits, num_filled_slots, stack)
        self.num_units = partitions[ALL].num_sms
        self.row_sizes = target.row_sizes

    def wait(self, engine: Any) -> None:
        engine.wait()


def open_gpu_probe(engines: EngineDir, quick: bool, overlap: bool = False) -> GpuProbe:
    """Open a directory's engines on the first GPU; overlap: as in ProfileOptions. Raises like open_engines()."""
    limits, needed, num_blocks = probe_sizes(engines.build_config, quick, MAX_ROWS, MAX_REQUESTS)
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        overlap = overlap or not quick
        request = OpenRequest(engines, needed, num_blocks, drafting=engines.has_draft, overlap=overlap)
        opened = open_engines(request, stack)
        num_slots = needed.max_batch_size
        num_filled = min(num_slots, MANY_REQUESTS) if quick else num_slots
        probe = GpuProbe(opened.target, opened.draft, opened.sampler, opened.partitions, limits, num_filled, stack)
        guard.pop_all()
        return probe
