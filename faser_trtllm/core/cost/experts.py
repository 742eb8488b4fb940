"""Expected number of distinct experts per layer whose weights a pass of a mixture-of-experts model reads.

The probability that a request's rows choose an expert is Beta distributed over experts and requests, with the mean
m = top_k / num_experts. Requests are independent, and so are the rows of one request given its probabilities. The one
parameter left is the overlap o: the share of a row's experts that another row of its request also chooses. q(n) is the
chance that none of n rows of a request chooses an expert.

    q(n) = prod_{j < n} (b + j) / (a + b + j)     a + b = (1 - o) / (o - m), a = m (a + b); o = m: q(n) = (1 - m)^n
    distinct experts = num_experts (1 - prod over requests q(n_i))

Some experts are popular with all requests, so rows of two requests share s of their experts, m <= s <= o. An expert's
mean is then Beta distributed too, as above with s in place of o, and a request's probabilities given that mean have the
correlation (o - s) / (1 - s). The result is the average over an expert's means, by Gaussian quadrature.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
OVERLAP = 0.2  # default while nothing is known of the text; measured values were 0.16 to 0.45
MOST_OVERLAP = 0.95  # limit of overlaps fitted to counts
NUM_NODES = 16  # of the quadrature
_INDEPENDENT = 1e-6  # correlations below this count as none
_LEAST = 1e-12  # minimum chance that an expert is not chosen, so that logarithms are finite
_MOST_EXPERTS = 1 << 16
_GRID, _FINER = 12, 3  # of the search for overlaps: values on the first grid, and the number of finer grids


@dataclass(frozen=True)
class Routing:
    """How rows choose among a layer's experts; raises ValueError for values that no layer can have.

    Overlaps below top_k / num_experts, the overlap by chance, count as that, and overlap counts as at least across.
    """

    num_experts: int
    top_k: int
    overlap: float = OVERLAP  # share of experts that two rows of one request have in common
    across: float = 0.0  # share of experts that rows of two requests have in common

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts <= _MOST_EXPERTS:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts; it must be 1 to all of at most 65536")
        if not (0.0 <= self.overlap <= 1.0 and 0.0 <= self.across <= 1.0):
            raise ValueError(f"overlaps {self.overlap} and {self.across}; they must be 0 to 1")

    @property
    def chance(self) -> float:
        """The overlap of rows that choose experts at random."""
        return self.top_k / self.num_experts

    def distinct(self, rows: npt.ArrayLike) -> float:
        """Return the expected distinct experts of a pass, given the rows of each request [num_requests]."""
        counts = np.asarray(rows, np.int64)
        weights, log_unused = self._log_unused(int(counts.max(initial=0)))
        return float(self.num_experts * (weights @ -np.expm1(log_unused[:, counts].sum(1))))

    def distinct_of(self, num_rows: npt.ArrayLike, num_requests: npt.ArrayLike) -> FloatArray:
        """Return the expected distinct experts of passes whose rows (fractions allowed) are spread evenly over the
        requests. Fewer rows than requests count as requests of one row each. The arguments are broadcast."""
        weights, log_unused = self._log_unused_of(num_rows, num_requests)
        return np.asarray(self.num_experts * (-np.expm1(log_unused) @ weights))

    def reads_of(self, num_rows: npt.ArrayLike, num_requests: npt.ArrayLike) -> BatchReads:
        """Prepare distinct_of for passes that also run a prompt's rows; see BatchReads."""
        weights, log_unused = self._log_unused_of(num_rows, num_requests)
        return BatchReads(self, np.exp(log_unused) * weights)

    def unused(self, num_rows: int) -> FloatArray:
        """Return the chances that no row of one request with num_rows rows chooses an expert, [num_nodes]."""
        return np.exp(self._log_unused(num_rows)[1][:, num_rows])

    def _log_unused_of(self, num_rows: npt.ArrayLike, num_requests: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Return quadrature weights [num_nodes] and logs [..., num_nodes] of the chance that no row chooses it."""
        rows, requests = np.broadcast_arrays(np.asarray(num_rows, np.float64), np.asarray(num_requests, np.float64))
        requests = np.maximum(1.0, np.minimum(rows, requests))
        each = rows / requests
        whole = np.floor(each).astype(np.int64)
        weights, log_unused = self._log_unused(int(whole.max(initial=0)) + 1)
        share, by_rows = (each - whole)[..., None], log_unused.T
        return weights, requests[..., None] * ((1.0 - share) * by_rows[whole] + share * by_rows[whole + 1])

    def _log_unused(self, most_rows: int) -> tuple[FloatArray, FloatArray]:
        size = 1 << max(6, most_rows.bit_length())
        return _log_unused(self.num_experts, self.top_k, self.overlap, self.across, size)

    def fitted(self, counts: Sequence[tuple[float, float, float]]) -> Routing:
        """Return a copy whose overlaps fit counts best: (rows, requests, distinct experts) of passes whose rows are
        spread evenly over the requests. Minimizes squared errors of logs on ever finer grids."""
        rows, requests, found = np.array(counts, np.float64).reshape(-1, 3).T
        logs, chance = np.log(found), min(self.chance, MOST_OVERLAP)

        def error(overlaps: tuple[float, float]) -> float:
            routing = replace(self, overlap=overlaps[0], across=overlaps[1])
            return float(np.square(np.log(routing.distinct_of(rows, requests)) - logs).sum())

        axes = [np.linspace(chance, MOST_OVERLAP, _GRID)] * 2
        best = chance, chance
        for _ in range(1 + _FINER):
            pairs = [(float(o), float(s)) for o, s in itertools.product(*axes) if s <= o]
            best = min([best, *pairs], key=error)
            steps = [axis[1] - axis[0] for axis in axes]
            axes = [
                np.clip(np.linspace(center - step, center + step, 9), chance, MOST_OVERLAP)
                for center, step in zip(best, steps, strict=True)
            ]
        return replace(self, overlap=best[0], across=best[1])


@dataclass(frozen=True)
class BatchReads:
    """Passes of decoding requests, to which rows of a prompt may be added."""

    routing: Routing
    unused: FloatArray  # [num_passes, num_nodes] weighted chances that none of the rows chooses an expert

    def distinct(self, num_prompt_rows: int) -> FloatArray:
        """Return the expected distinct experts [num_passes] with num_prompt_rows rows of one more request."""
        return np.asarray(self.routing.num_experts * (1.0 - self.unused @ self.routing.unused(num_prompt_rows)))


@functools.lru_cache(maxsize=64)
def _log_unused(
    num_experts: int, top_k: int, overlap: float, across: float, most_rows: int
) -> tuple[FloatArray, FloatArray]:
    """Return read-only weights [num_nodes] of the quadrature, and log q(n) at each node for n = 0 to most_rows."""
    mean = min(top_k / num_experts, 1.0 - _LEAST)
    means, weights = _means(mean, min((across - mean) / (1.0 - mean), 1.0 - _LEAST))
    across = min(max(across, mean), 1.0 - _LEAST)
    correlation = min((overlap - across) / (1.0 - across), 1.0 - _LEAST)
    n, others = np.arange(most_rows), np.maximum(1.0 - means, _LEAST)[:, None]
    if correlation < _INDEPENDENT:
        steps = np.broadcast_to(np.log(others), (means.size, most_rows))
    else:
        total = 1.0 / correlation - 1.0
        steps = np.log((others * total + n) / (total + n))
    found = np.concatenate([np.zeros((means.size, 1)), np.cumsum(steps, axis=1)], axis=1)
    for array in (weights, found):
        array.setflags(write=False)
    return weights, found


def _means(mean: float, correlation: float) -> tuple[FloatArray, FloatArray]:
    """Return nodes and weights of Gaussian quadrature for a Beta distribution with a + b = 1 / correlation - 1 (Golub
    and Welsch: eigenvalues of the Jacobi polynomials' recurrence)."""
    if correlation < _INDEPENDENT:
        return np.array([mean]), np.ones(1)
    total = 1.0 / correlation - 1.0
    alpha, beta = (1.0 - mean) * total - 1.0, mean * total - 1.0
    n = np.arange(1.0, NUM_NODES)
    both = 2.0 * n + alpha + beta
    diagonal = np.concatenate([[(beta - alpha) / total], (beta**2 - alpha**2) / (both * (both + 2.0))])
    first = 4.0 * (1.0 + alpha) * (1.0 + beta) / (total**2 * (total + 1.0))
    n, both = n[1:], both[1:]
    squares = 4.0 * n * (n + alpha) * (n + beta) * (n + alpha + beta) / (both**2 * (both**2 - 1.0))
    side = np.sqrt(np.concatenate([[first], squares]))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(side, 1) + np.diag(side, -1))
    return np.clip(0.5 * (1.0 + values), 0.0, 1.0), vectors[0] ** 2
