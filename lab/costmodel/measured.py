"""Times of passes on a GPU, composed from measured kernels.

A pass is its matrix products by rows, and per layer attention, append_kv, the gated activation and the merging of
chunks. Its times do not have the form of the curves that a profile fits, so a policy can be tested on times that its
table does not describe exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from faser_trtllm.core.cost_table import ALL, Interference
from faser_trtllm.engine.buckets import MAX_GRAPH_ROWS, Buckets
from faser_trtllm.errors import ConfigError

H100 = "h100-measured"
NAMES = (H100,)
MAX_NUM_TOKENS = 2048  # most rows of a pass


@dataclass(frozen=True)
class ByRows:
    """A time by rows or requests, interpolated and extrapolated linearly."""

    at: tuple[float, ...]
    times: tuple[float, ...]

    def __call__(self, n: float) -> float:
        at, times = self.at, self.times
        if n > at[-1]:
            return times[-1] + (n - at[-1]) * (times[-1] - times[-2]) / (at[-1] - at[-2])
        return float(np.interp(n, at, times))


class MeasuredGpu:
    """Times of one pair on one GPU, in ms. Raises ConfigError for a name that is not in NAMES.

    is_padded: passes above MAX_GRAPH_ROWS are padded like those of the engines; when measured they were not.
    """

    traffic = None
    num_segments = 0

    def __init__(self, name: str = H100, *, is_padded: bool = True) -> None:
        if name not in NAMES:
            raise ConfigError(f"the measured table is {name!r}; it must be one of: {', '.join(NAMES)}")
        path = files("lab.costmodel") / "data" / f"{name.replace('-', '_')}.json"
        self.data: Mapping[str, Any] = json.loads(path.read_text())
        self.name = name
        self._buckets = Buckets(MAX_GRAPH_ROWS, MAX_NUM_TOKENS if is_padded else 0)
        self._gemm_ms = self._by_rows("gemm_ms", "rows", "ms")
        self._us_per_layer = [self._by_rows(kernel, "rows", "us") for kernel in ("gated_silu_us", "append_kv_us")]
        self._combine_us = self._by_rows("combine_us", "rows", "us")
        self._pass_us = self._by_rows("pass_us", "rows", "us")
        self._step_ms = self._by_rows("draft_step_ms", "requests", "ms")
        self._rows_ms = self._by_rows("draft_rows_ms", "rows", "ms")

    def verify_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """Return the time of a target pass with rejection sampling."""
        rows = self._buckets.rows(num_rows)
        layer_us = sum(time(rows) for time in self._us_per_layer) + self._combine_us(num_rows)
        layer_us += self._attention_us(num_rows, num_requests, context_len)
        test_ms = float(self.data["drafts_test_ms"]["ms"]) if num_rows > num_requests else 0.0
        kernels_us = float(self.data["num_layers"]) * layer_us + self._pass_us(rows)
        return self._gemm_ms(rows) + 1e-3 * kernels_us + test_ms

    def decode_ms(self, num_requests: int, context_len: float) -> float:
        """Return the time of a pass without drafts; drafting in between makes no difference to a GPU's caches."""
        return self.verify_ms(num_requests, num_requests, context_len)

    def draft_step_ms(self, num_requests: int, context_len: float, partition: str = ALL) -> float:
        return self._step_ms(num_requests) + self._draft_context_ms(num_requests, context_len)

    def draft_rows_ms(self, num_rows: int, num_requests: int, context_len: float, partition: str = ALL) -> float:
        """Return the time of a draft call's first step, with all rows that the draft model has not seen."""
        ms = self._rows_ms(self._buckets.rows(num_rows))
        if num_rows > MAX_GRAPH_ROWS:  # mostly prompts
            return ms
        return ms + self._draft_context_ms(min(num_rows, num_requests), context_len)

    def host_ms(self, num_requests: int, num_joining: int, is_drafting: bool) -> float:
        """Return the time of a step outside its passes, by numbers of decoding and of joining requests."""
        given = self.data["host_ms"]
        once, per_request = given["drafting" if is_drafting else "off"]
        return float(once + per_request * num_requests + given["per_joining"] * num_joining)

    def segment_ms(self, segment: int, num_rows: int, num_requests: int, context_len: float) -> float:
        raise ConfigError(f"{self.name} has no segments: their passes were not measured one by one")

    def exit_ms(self, boundary: int, num_rows: int) -> float:
        return 0.0

    def interference_of(self, draft_partition: str, verify_partition: str) -> Interference | None:
        given = self.data["interference"]
        return Interference(draft_partition, verify_partition, given["draft"], given["verify"])

    def _draft_context_ms(self, num_requests: float, context_len: float) -> float:
        """Return the additional time of a context longer than the measured one."""
        given = self.data["draft_step_ms"]
        per_position_us = float(given["us_per_position"]) + float(given["us_per_request_position"]) * num_requests
        return 1e-3 * per_position_us * (context_len - float(given["context"]))

    def _attention_us(self, num_rows: int, num_requests: int, context_len: float) -> float:
        """Return attention's time: at least one block's walk of a chunk, and the cache's bytes for many requests."""
        given = self.data["attention"]
        floor_us = given["floor_us"] + given["us_per_position"] * min(context_len, given["chunk"])
        gb = 1e-9 * num_requests * context_len * self.data["kv_bytes_per_token"]
        bytes_us = 1e3 * gb / given["tb_per_s"] * (given["rows_factor"] if num_rows > num_requests else 1.0)
        return float(np.hypot(floor_us, bytes_us))

    @property
    def gpu(self) -> str:
        """The GPU's name in lab/costmodel/gpu.py."""
        return self.name.partition("-")[0]

    @property
    def source(self) -> str:
        """Place, date and models of the measurement, in words."""
        given = self.data
        return f"passes that were measured on {given['measured']}, of {given['target']} and {given['draft']}"

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Row counts that passes are padded to, ascending."""
        return (*self._buckets.sizes(), *self._buckets.large_sizes())

    def _by_rows(self, key: str, at: str, times: str) -> ByRows:
        given = self.data[key]
        return ByRows(tuple(map(float, given[at])), tuple(map(float, given[times])))
