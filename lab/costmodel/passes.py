"""The time of one pass of a model on a GPU, or on a share of its SMs.

T = G(n) r + X(n, D) + E(n) + R(n) + max(A(b, c) / g, a(c)) + H(n) r + o: matrices, D distinct experts per layer,
elementwise kernels, all-reduces, attention, LM head and the launch of a graph, for n rows of b requests with c tokens
of context each. g: the share of the bandwidth that a share of the SMs uses; a: the least time of our attention; r: the
slowdown of products on fewer SMs, where a product takes (latency^4 + memory^4 + compute^4)^(1/4). traffic.py, next to
this file, has the effect of concurrent passes; docs/plan.md has the sources and errors.
"""

from __future__ import annotations

import math

from faser_trtllm.engine.buckets import MAX_GRAPH_ROWS, Buckets
from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.anchors import Anchors
from lab.costmodel.experts import expert_times
from lab.costmodel.gpu import Gpu
from lab.costmodel.shape import ModelShape

GRAPH_MS = 0.012  # launch of one graph
OVERLAP_POWER = 4.0  # a pass takes (memory^4 + compute^4)^(1/4), nearly the maximum
# Measured on an H100, 2026-11-26: per layer, our attention takes at least one thread block's walk of a chunk.
ATTENTION_MS, ATTENTION_POSITION_MS = 0.008, 0.00004
ATTENTION_CHUNK, ATTENTION_HEAD_DIM = 512, 128  # positions, and the head size of ATTENTION_POSITION_MS
PRODUCTS, PRODUCT_MS = 4, 0.0035  # products per layer, and the latency of one
ONE_WAVE, ONE_WAVE_ROWS = 0.4, 640  # share of arithmetic in products of one wave of tiles, up to these rows
PREFILL_EFFICIENCY = 0.6  # share of flops in attention among many rows of one request


class PassModel:
    """A model of passes. is_ours: our GPU engine, which pads passes and whose attention has a least time."""

    def __init__(self, gpu: Gpu, shape: ModelShape, *, is_ours: bool = True) -> None:
        if shape.weight_bytes == 1 and not gpu.has_fp8:
            raise InvalidArgumentError(f"gpu is {gpu.name}, which has no fp8; leave fp8 out or take a newer one")
        self.gpu, self.shape = gpu, shape
        self._times = Anchors(gpu).times(shape)
        self._experts = None if shape.experts is None else expert_times(gpu, shape)
        self._buckets = Buckets(MAX_GRAPH_ROWS) if is_ours else None

    def ms(
        self,
        num_rows: float,
        num_requests: float,
        context_len: float,
        *,
        sm_share: float = 1.0,
        layer_share: float = 1.0,
        has_head: bool = True,
        num_experts: float | None = None,
    ) -> float:
        """Return the ms of a pass, or with layer_share of a segment, which has_head if it is the last.

        num_experts: distinct experts per layer; None: the expected number with rows spread evenly over requests.
        """
        times = self._times
        rows = self._padded(num_rows)
        ratio = self.product_ratio(rows, sm_share)
        layers = times.by_rows(times.gemm, rows) * ratio
        layers += times.by_rows(times.elementwise, rows) + times.by_rows(times.all_reduce, rows)
        layers += self._attention_ms(num_rows, num_requests, context_len, sm_share)
        if num_experts is None:
            num_experts = self.distinct_experts(num_rows, num_requests)
        layers += self.experts_ms(rows, num_experts, sm_share)
        head = times.by_rows(times.head, rows) * ratio if has_head else 0.0
        return layer_share * layers + head + GRAPH_MS

    @property
    def per_expert_ms(self) -> float:
        """The ms of one more distinct expert in each layer, on the whole GPU; 0 without experts."""
        return 0.0 if self._experts is None else self.shape.num_layers * self._experts.expert_ms

    def distinct_experts(self, num_rows: float, num_requests: float) -> float:
        """Return the expected distinct experts per layer with rows spread evenly over requests; 0 without experts."""
        experts = self.shape.experts
        return 0.0 if experts is None else float(experts.routing.distinct_of(num_rows, num_requests))

    def experts_ms(self, num_rows: float, num_experts: float, sm_share: float = 1.0) -> float:
        """Return the ms of all layers' experts; 0 without any."""
        if self._experts is None:
            return 0.0
        bandwidth = self.gpu.bandwidth_share(sm_share)
        return self.shape.num_layers * self._experts.ms(num_rows, num_experts, bandwidth=bandwidth, sm_share=sm_share)

    def head_ms(self, num_rows: float) -> float:
        """Return the ms of the LM head alone, on the whole GPU."""
        return self._times.by_rows(self._times.head, num_rows)

    def products_ms(self, num_rows: float) -> float:
        """Return the ms of all layers' dense matrices, without the LM head, on the whole GPU."""
        return self._times.by_rows(self._times.gemm, num_rows)

    def attention_ms(self, num_requests: float, context_len: float, sm_share: float = 1.0) -> float:
        """Return the ms of attention in all layers for one row per request."""
        shape, bandwidth = self.shape, self.gpu.bandwidth_share(sm_share)
        contexts = (1.0 - shape.windowed_share, context_len), (shape.windowed_share, min(context_len, shape.window))
        return sum(
            share * max(self._times.attention_ms(num_requests, length) / bandwidth, self._least_attention_ms(length))
            for share, length in contexts
            if share
        )

    def context_ms(self, num_rows: float, sm_share: float = 1.0) -> float:
        """Return the ms of a block drafter's keys and values for num_rows hidden rows of its target."""
        gb, gpu = self.shape.context_gb, self.gpu
        gflop = gb * num_rows  # two operations per weight of two bytes
        return (
            PRODUCT_MS * (1 + self.shape.num_layers)
            + gb / gpu.gb_per_ms / gpu.bandwidth_share(sm_share)
            + gflop / gpu.tflops / sm_share
        )

    def prompt_ms(self, num_tokens: int) -> float:
        """Return the ms of a prompt alone, of which only the last row needs the LM head."""
        whole = self.ms(num_tokens, 1, 1, has_head=False) + self.head_ms(1)
        attended = num_tokens * (num_tokens + 1) / 2
        return whole + attended * self._attended_ms()

    def pass_gb(self, num_requests: float, context_len: float) -> float:
        """Return the GB that a pass reads, with the experts of one row."""
        return self.shape.pass_gb + self.shape.token_gb * num_requests * context_len

    def product_ratio(self, rows: float, sm_share: float) -> float:
        """Return the ratio of a matrix product's time on a share of the SMs to that on the whole GPU."""
        latency_ms = PRODUCT_MS * PRODUCTS * self.shape.num_layers
        memory_ms = self.shape.dense_gb / self.gpu.gb_per_ms
        compute_ms = self.shape.gflop_per_row * rows / self.gpu.tflops * self.shape.weight_bytes / 2
        one_wave = ONE_WAVE * min(1.0, ONE_WAVE_ROWS / rows)
        slower = memory_ms / self.gpu.bandwidth_share(sm_share)
        fewer = compute_ms * ((1.0 - one_wave) / sm_share + one_wave * math.ceil(1.0 / sm_share - 1e-9))
        p = OVERLAP_POWER
        there = (latency_ms**p + slower**p + fewer**p) ** (1.0 / p)
        alone = (latency_ms**p + memory_ms**p + compute_ms**p) ** (1.0 / p)
        return float(there / alone)

    def _attention_ms(self, num_rows: float, num_requests: float, context_len: float, sm_share: float) -> float:
        """Return the ms of attention; a request's cache is read once for all its rows, further rows only compute."""
        reading = self.attention_ms(num_requests, context_len, sm_share)
        return reading + max(0.0, num_rows - num_requests) * context_len * self._attended_ms() / sm_share

    def _least_attention_ms(self, context_len: float) -> float:
        if self._buckets is None:
            return 0.0
        position_ms = ATTENTION_POSITION_MS * self.shape.head_dim / ATTENTION_HEAD_DIM
        return self.shape.num_layers * (ATTENTION_MS + position_ms * min(context_len, ATTENTION_CHUNK))

    def _attended_ms(self) -> float:
        """Return the ms to compute a row's attention to one token of context."""
        return self.shape.gflop_per_attended / (PREFILL_EFFICIENCY * self.gpu.tflops)

    def _padded(self, num_rows: float) -> float:
        if self._buckets is None or num_rows > MAX_GRAPH_ROWS:
            return num_rows
        return self._buckets.rows(int(-(-num_rows // 1)))
