"""Experts of a layer whose weights a pass of a mixture of experts reads: their number in the mean, by rows.

An expert is taken by a row of a request with a probability that is Beta distributed over experts and requests, with the
mean m = top_k / num_experts. Requests are independent of each other, and the rows of one are, given its probabilities.
So one parameter is left, the overlap o: the share of a row's experts that another row of its request takes too.

    q(n) = prod_{j < n} (b + j) / (a + b + j)     a + b = (1 - o) / (o - m), a = m (a + b); o = m: q(n) = (1 - m)^n
    distinct experts = num_experts (1 - prod over requests q(n_i))
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.nnls import FloatArray

OVERLAP = 0.2  # as long as nothing is known of the text: measured were 0.16 to 0.45
_INDEPENDENT = 1e-6  # a correlation below which there is none
_LEAST = 1e-12  # chance of an expert not to be taken, so that logarithms are finite


@dataclass(frozen=True)
class Routing:
    """How rows choose among a layer's experts. overlap: of two rows of a request; below top_k / num_experts, which is
    chance, it is taken for that."""

    num_experts: int
    top_k: int
    overlap: float = OVERLAP

    def distinct(self, rows: npt.ArrayLike) -> float:
        """Expected distinct experts of a pass with so many rows of each request [num_requests]."""
        counts = np.asarray(rows, np.int64)
        return float(self.num_experts * -np.expm1(self._log_unused(int(counts.max(initial=0)))[counts].sum()))

    def distinct_of(self, num_rows: npt.ArrayLike, num_requests: npt.ArrayLike) -> FloatArray:
        """Expected distinct experts of passes of so many rows (fractions, too), spread evenly over the requests; of no
        more than a row each where there are fewer rows than requests. The two are broadcast."""
        rows, requests = np.broadcast_arrays(np.asarray(num_rows, np.float64), np.asarray(num_requests, np.float64))
        requests = np.maximum(1.0, np.minimum(rows, requests))
        each = rows / requests
        whole = np.floor(each).astype(np.int64)
        log_unused = self._log_unused(int(whole.max(initial=0)) + 1)
        unused = requests * (log_unused[whole] + (each - whole) * (log_unused[whole + 1] - log_unused[whole]))
        return np.asarray(self.num_experts * -np.expm1(unused))

    def _log_unused(self, most_rows: int) -> FloatArray:
        return _log_unused(self.num_experts, self.top_k, self.overlap, 1 << max(6, most_rows.bit_length()))


@functools.lru_cache(maxsize=64)
def _log_unused(num_experts: int, top_k: int, overlap: float, most_rows: int) -> FloatArray:
    """log q(n) for n = 0 to most_rows, read-only."""
    mean = min(top_k / num_experts, 1.0 - _LEAST)
    correlation = min((overlap - mean) / (1.0 - mean), 1.0 - _LEAST)
    n = np.arange(most_rows)
    if correlation < _INDEPENDENT:
        steps = np.full(most_rows, np.log1p(-mean))
    else:
        total = 1.0 / correlation - 1.0
        steps = np.log(((1.0 - mean) * total + n) / (total + n))
    found = np.concatenate([[0.0], np.cumsum(steps)])
    found.setflags(write=False)
    return found
