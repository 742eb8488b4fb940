"""FASER's adaptive drafter (arXiv 2604.20503): a Gaussian process over (length, batch size, acceptance), whose lower
confidence bound of the time per token chooses the speculative length.

A length is kept for a few steps, whose ms per token is one observation. The next length has the lowest predicted log ms
per token minus KAPPA standard deviations, so lengths that were not tried yet look good.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from faser_trtllm.policy.base import Decision, PlanStats, StepView

FloatArray = npt.NDArray[np.float64]

WINDOW = 96  # observations
STEPS_PER_OBSERVATION = 6
KAPPA = 1.0
LENGTH_SCALE = 0.35  # of inputs scaled to about [0, 1]
SIGNAL_VARIANCE = 0.25  # of log ms per token around the mean
NOISE_VARIANCE = 0.01
ACCEPTANCE_MEMORY = 0.9  # per step
MAX_LOG_BATCH = 8.0  # log2 of the batch size that is scaled to 1


class GaussianProcess:
    """Zero-mean regression over a window of the latest points, with white noise and the kernel
    signal x exp(-|x - x'|^2 / (2 length_scale^2)).

    Rasmussen and Williams, Gaussian Processes for Machine Learning, algorithm 2.1.
    """

    def __init__(self, num_inputs: int, window: int, length_scale: float, signal: float, noise: float) -> None:
        self._x = np.zeros((window, num_inputs))
        self._y = np.zeros(window)
        self._size = 0
        self._next = 0
        self._length_scale, self._signal, self._noise = length_scale, signal, noise
        self._factor: FloatArray | None = None
        self._weights = np.zeros(0)

    def __len__(self) -> int:
        return self._size

    def add(self, x: npt.ArrayLike, y: float) -> None:
        """Add a point in place of the oldest one."""
        self._x[self._next] = x
        self._y[self._next] = y
        self._next = (self._next + 1) % len(self._y)
        self._size = min(self._size + 1, len(self._y))
        self._factor = None

    def predict(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation (without noise) at x [n, num_inputs], [n] each."""
        seen = self._x[: self._size]
        if self._factor is None:
            covariance = self._kernel(seen, seen) + self._noise * np.eye(self._size)
            self._factor = np.linalg.inv(np.linalg.cholesky(covariance))
            self._weights = self._factor.T @ (self._factor @ self._y[: self._size])
        cross = self._kernel(x, seen)
        half = cross @ self._factor.T
        variance = self._signal - np.einsum("ij,ij->i", half, half)
        return cross @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _kernel(self, a: FloatArray, b: FloatArray) -> FloatArray:
        distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(2)
        return self._signal * np.exp(-distance / (2.0 * self._length_scale**2))  # type: ignore[no-any-return]


class GpLcbPolicy:
    def __init__(self, max_draft_len: int) -> None:
        self.name = "gp_lcb"
        self._max_draft_len = max_draft_len
        self._process = GaussianProcess(3, WINDOW, LENGTH_SCALE, SIGNAL_VARIANCE, NOISE_VARIANCE)
        self._mean = 0.0  # running mean of the observations, the process's mean function
        self._acceptance = 0.8  # moving average over verified drafts
        self._length = max_draft_len
        self._batch_class = 0
        self._steps_left = 0
        self._seen = PlanStats()  # with the current length

    def plan(self, view: StepView) -> Decision:
        n = len(view.decoding)
        if n == 0:
            return Decision([])
        if n.bit_length() != self._batch_class or self._steps_left <= 0:
            self._batch_class = n.bit_length()
            self._length = self._choose(n)
            self._steps_left = STEPS_PER_OBSERVATION
            self._seen = PlanStats()
        return Decision([self._length] * n, num_held=self._steps_left - 1)

    def observe(self, stats: PlanStats) -> None:
        if stats.num_context_rows:  # the paper's process does not model prompts
            return
        if stats.num_verified:
            kept = ACCEPTANCE_MEMORY**stats.num_steps
            self._acceptance = kept * self._acceptance + (1.0 - kept) * stats.num_accepted / stats.num_verified
        self._steps_left -= stats.num_steps
        seen = self._seen = PlanStats(
            self._seen.num_steps + stats.num_steps,
            self._seen.ms + stats.ms,
            num_tokens=self._seen.num_tokens + stats.num_tokens,
            num_requests=self._seen.num_requests + stats.num_requests,
        )
        if self._steps_left <= 0 and seen.num_tokens:
            batch = seen.num_requests / seen.num_steps
            # Time per token and request, so that batch sizes are comparable.
            value = math.log(max(seen.ms, 1e-6) * batch / seen.num_tokens)
            count = len(self._process) + 1
            self._mean += (value - self._mean) / count
            self._process.add(self._input(self._length, batch), value - self._mean)

    def _choose(self, num_requests: int) -> int:
        if len(self._process) == 0:
            return self._max_draft_len // 2
        lengths = range(self._max_draft_len + 1)
        mean, deviation = self._process.predict(np.array([self._input(k, num_requests) for k in lengths]))
        return int(np.argmin(mean - KAPPA * deviation))

    def _input(self, length: int, num_requests: float) -> list[float]:
        return [
            length / max(1, self._max_draft_len),
            math.log2(max(num_requests, 1.0)) / MAX_LOG_BATCH,
            self._acceptance,
        ]
