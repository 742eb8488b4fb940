"""The times that a simulation follows: a cost table's, or those of a measured GPU."""

from __future__ import annotations

from typing import Protocol

from faser_trtllm.core.cost_table import Interference
from faser_trtllm.core.traffic import Traffic


class PassTimes(Protocol):
    """Methods as CostTable has them, in ms."""

    @property
    def traffic(self) -> Traffic | None: ...

    def verify_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ...) -> float: ...

    def decode_ms(self, num_requests: int, context_len: float) -> float: ...

    def draft_step_ms(self, num_requests: int, context_len: float, partition: str = ...) -> float: ...

    def draft_rows_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ...) -> float: ...

    def segment_ms(self, segment: int, num_rows: int, num_requests: int, context_len: float) -> float: ...

    def exit_ms(self, boundary: int, num_rows: int) -> float: ...

    def interference_of(self, draft_partition: str, verify_partition: str) -> Interference | None: ...
