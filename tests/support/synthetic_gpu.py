"""GPUs whose passes take what physics says, for tests of cost tables: rooflines, waves of tiles, launches, attention.

Written from how GPUs work, not from the form of a cost curve: nothing here is a sum of stairs and slopes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.cost_curve import CostSample
from faser_trtllm.profiling.grid import Point
from faser_trtllm.profiling.measure import sample_of

GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
TILES = ((64, 64), (64, 128), (128, 128), (128, 256))  # rows x columns, of which a GEMM takes the fastest
CHUNK = 512  # positions that one block of attention walks


@dataclass(frozen=True)
class Gpu:
    """tflops: that GEMMs reach in full waves. bandwidth: TB/s that GEMMs reach."""

    num_sms: int
    tflops: float
    bandwidth: float
    launch_us: float = 1.0  # between two kernels of a graph


@dataclass(frozen=True)
class Model:
    """A dense decoder with grouped queries, in bf16."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def matrices(self) -> list[tuple[int, int, int]]:
        """Inputs, outputs and how many there are."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (self.hidden_size, q + 2 * kv, self.num_layers),
            (q, self.hidden_size, self.num_layers),
            (self.hidden_size, 2 * self.ffn_size, self.num_layers),
            (self.ffn_size, self.hidden_size, self.num_layers),
            (self.hidden_size, self.vocab_size, 1),
        ]


@dataclass(frozen=True)
class SyntheticGpu:
    """A pair of models on a GPU. host_ms: of a pass; call_ms: of a draft call, besides its steps."""

    gpu: Gpu
    target: Model
    draft: Model
    host_ms: float = 0.3
    call_ms: float = 0.2

    def ms(self, kind: str, num_rows: int, num_requests: int, context_len: float) -> float:
        """Return the time that a pass of a CostSample's kind takes."""
        if kind == "draft_step":
            return self._pass_ms(self.draft, num_rows, num_requests, context_len, num_requests) + 0.03
        if kind == "draft_rows":
            return self._pass_ms(self.draft, num_rows, num_requests, context_len, num_requests) + self.call_ms
        warm = 0.97 if kind == "decode" else 1.0  # no other model's weights in the caches
        return warm * self._pass_ms(self.target, num_rows, num_requests, context_len, num_rows) + self.host_ms

    def samples(self, points: Iterable[Point], noise: float, seed: int) -> tuple[list[CostSample], list[CostSample]]:
        """(to fit, held out), each off by a share of `noise` at random."""
        rng = np.random.default_rng(seed)
        found: tuple[list[CostSample], list[CostSample]] = ([], [])
        for point in points:
            at = sample_of(point, 0.0)
            ms = self.ms(at.kind, at.num_rows, at.num_requests, at.context_len) * np.exp(noise * rng.standard_normal())
            found[point.held_out].append(sample_of(point, float(ms)))
        return found

    def _pass_ms(self, model: Model, num_rows: int, num_requests: int, context_len: float, num_logits: int) -> float:
        padded = next((n for n in GRAPH_ROWS if n >= num_rows), num_rows)
        us = 0.0
        for inputs, outputs, count in model.matrices():
            us += count * self._gemm_us(num_logits if count == 1 else padded, inputs, outputs)
        elementwise_us = 2e-6 * padded * (8 * model.hidden_size + 5 * model.ffn_size) / self.gpu.bandwidth
        each_us = self._attention_us(model, num_rows, num_requests, context_len) + elementwise_us
        num_launches = 9
        return 1e-3 * (us + model.num_layers * (each_us + num_launches * self.gpu.launch_us))

    def _gemm_us(self, rows: int, inputs: int, outputs: int) -> float:
        """Loads and tensor cores overlap; the slower decides, but for the pipeline's start."""
        loads_us = 2e-6 * inputs * outputs / self.gpu.bandwidth
        each_us = 1e-6 * self.gpu.tflops / self.gpu.num_sms  # Tflop of an SM in a us
        math_us = min(
            -(-(-(-rows // m) * -(-outputs // n)) // self.gpu.num_sms) * 2e-12 * m * n * inputs / each_us
            for m, n in TILES
        )
        return float((loads_us**3 + math_us**3) ** (1 / 3)) + 1.5

    def _attention_us(self, model: Model, num_rows: int, num_requests: int, context_len: float) -> float:
        """A block walks a chunk in turn, whoever else runs; all caches are loaded; rows are multiplied."""
        walk_us = 6.0 + 0.04 * min(context_len, CHUNK)
        gb = 4e-9 * num_requests * context_len * model.num_kv_heads * model.head_dim
        loads_us = 1e3 * gb / (0.65 * self.gpu.bandwidth)
        math_us = 4e-6 * num_rows * context_len * model.num_heads * model.head_dim / (0.35 * self.gpu.tflops)
        return float((walk_us**2 + (loads_us + math_us) ** 2) ** 0.5)


H100, L4, B200 = Gpu(132, 690.0, 3.0), Gpu(58, 100.0, 0.27), Gpu(148, 1600.0, 7.0, 0.8)
LARGE = Model(32, 4096, 14336, 32, 8, 128, 128_256)
LARGER = Model(64, 5120, 27_648, 40, 8, 128, 152_064)
SMALL = Model(28, 1536, 8960, 12, 2, 128, 151_936)
DRAFT = Model(20, 1024, 2816, 16, 8, 64, 32_000)
TINY = Model(7, 256, 768, 4, 2, 64, 4096)
TINY_DRAFT = Model(2, 128, 384, 2, 1, 64, 4096)

GPUS = {
    "8B and 0.3B on an H100": SyntheticGpu(H100, LARGE, DRAFT),
    "32B and 0.3B on a B200": SyntheticGpu(B200, LARGER, DRAFT, host_ms=0.5, call_ms=0.5),
    "1.5B and tiny on an L4": SyntheticGpu(L4, SMALL, TINY),
    "tiny pair on an H100": SyntheticGpu(H100, TINY, TINY_DRAFT, host_ms=0.2),
}
