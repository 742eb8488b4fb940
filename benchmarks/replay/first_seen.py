"""The GPU with the measured engine: ragged passes above 512 rows, slow the first time."""

from __future__ import annotations

from faser_trtllm.core.cost_table import ALL
from lab.costmodel.measured import MeasuredGpu


class FirstSeenGpu(MeasuredGpu):
    """A MeasuredGpu where each call is a pass, and the first one with a large number of rows takes longer."""

    def __init__(self) -> None:
        super().__init__(is_padded=False)
        self._seen: set[tuple[str, int]] = set()

    def verify_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        return super().verify_ms(num_rows, num_requests, context_len, partition) + self._first_ms("target", num_rows)

    def draft_rows_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        return super().draft_rows_ms(num_rows, num_requests, context_len, partition) + self._first_ms("draft", num_rows)

    def _first_ms(self, model: str, num_rows: int) -> float:
        given = self.data["first_seen_ms"]
        if num_rows <= given["above_rows"] or (model, num_rows) in self._seen:
            return 0.0
        self._seen.add((model, num_rows))
        return float(given["ms"])
