"""Rank 0's engine of a tensor-parallel target. The executor uses it like any engine; it leads the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.cuda.parallel.ranks import Ranks
from faser_trtllm.engine.gpu.engine import GpuEngine
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.ops.prune_rows import HostPruning, PruneBatch
from faser_trtllm.partition.green_context import GpuPartition

WRONG_USE = (InvalidArgumentError, ConfigError, ValueError)
"""Errors of a wrong call. All ranks raise the same one and stay usable."""


class LeadingEngine(GpuEngine):
    """A GpuEngine that sends its calls to the other ranks first, except for calls that only read results.

    Every call raises FaserError once a rank has ended.
    """

    def __init__(self, *arguments: Any, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        self._told: RaggedBatch | None = None  # the batch that the other ranks have
        super().__init__(*arguments, **options)

    def use(self, partition: GpuPartition) -> None:
        if partition != self.partition:
            with self._leading("use", partition.name):
                super().use(partition)

    def capture_graphs(self, partitions: Iterable[GpuPartition]) -> int:
        partitions = tuple(partitions)
        with self._leading("capture_graphs", [partition.name for partition in partitions]):
            return super().capture_graphs(partitions)

    def run_segment(self, batch: RaggedBatch, segment: int) -> Any | None:
        is_known = segment > 0 and batch is self._told
        self._told = batch
        with self._leading("run_segment", None if is_known else _packed(batch), segment):
            return super().run_segment(batch, segment)

    def forward(self, batch: RaggedBatch) -> Any:
        with self._leading("forward", _packed(batch)):
            return super().forward(batch)

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        with self._leading("compact_rows", rows):
            super().compact_rows(rows)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        with self._leading("early_exit", rows, candidates):
            return super().early_exit(rows, candidates)

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        if batch.rule.record is not None:  # the host decides, through early_exit and compact_rows
            return HostPruning.prune(self, batch)
        with self._leading("prune", batch):
            return super().prune(batch)

    @contextmanager
    def _leading(self, name: str, *arguments: object) -> Iterator[None]:
        self._ranks.tell(name, *arguments)
        try:
            yield
        except WRONG_USE:
            raise
        except Exception as error:
            raise self._ranks.cause_of(error) from error


def _packed(batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with only its own requests' rows of the block table, since an engine reads no others."""
    table = batch.block_table[batch.slots]
    slots = np.arange(batch.num_requests, dtype=np.int32)
    return RaggedBatch(slots, batch.cu_rows, batch.token_ids, batch.positions, batch.logit_rows, table)
