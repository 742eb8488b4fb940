"""A synthetic router, which assigns experts to the rows of requests with a given overlap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.nnls import FloatArray

FADING = 0.35  # correlation of neighboring rows' scores apart from the topic
TRIALS, LAYERS_TRIED = 100, 4  # pairs of rows and layers for an estimate of overlap
HALVINGS = 14  # of the interval in the search for a share


class SyntheticRouter:
    """A router that takes the top k of Gaussian scores, so that the closed form's assumptions do not hold exactly.

    A score has parts for an expert's popularity, the request's topic, and a part that fades along the request's rows.
    Layers are independent of each other.
    """

    def __init__(self, routing: Routing, num_requests: int, num_positions: int, *, num_layers: int = 8, seed: int = 0):
        """Draw routes. routing.overlap: of neighboring rows; routing.across: of rows of two requests."""
        self.routing = routing
        self._rng = np.random.default_rng(seed)
        chance = routing.chance
        popular, topic = 0.0, 0.0
        if routing.across > chance:
            popular = self._share(routing.across, lambda share: self._alike(share, 0.0)[1])
        if routing.overlap > max(chance, routing.across):
            topic = self._share(routing.overlap, lambda share: self._alike(popular, share)[0], 1.0 - popular)
        taken = np.zeros((num_layers, num_requests, num_positions, routing.num_experts), bool)
        for layer in taken:
            np.put_along_axis(layer, self._routes(num_requests, num_positions, popular, topic), True, axis=2)
        self._taken = np.packbits(taken.transpose(1, 2, 0, 3), axis=3)  # [requests, positions, layers, bytes]

    def distinct(self, requests: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> float:
        """Return the distinct experts of a pass over these rows, the mean over layers."""
        rows = self._taken[requests % len(self._taken), positions % self._taken.shape[1]]
        used = np.bitwise_or.reduce(rows, axis=0)
        return float(np.unpackbits(used).sum() / used.shape[0])

    def _share(self, overlap: float, overlap_of: Callable[[float], float], most: float = 1.0) -> float:
        """Return the share of a part of the scores that gives an overlap."""
        low, high = 0.0, most
        for _ in range(HALVINGS):
            share = 0.5 * (low + high)
            low, high = (share, high) if overlap_of(share) < overlap else (low, share)
        return 0.5 * (low + high)

    def _alike(self, popular: float, topic: float) -> tuple[float, float]:
        """Return the overlap of neighboring rows, and of rows of two requests, with these parts of the scores."""
        routes = [self._routes(TRIALS, 2, popular, topic) for _ in range(LAYERS_TRIED)]
        pairs = np.array([(_overlap(r[:, 0], r[:, 1]), _overlap(r[:-1, 0], r[1:, 0])) for r in routes])
        within, across = pairs.mean(0).tolist()
        return within, across

    def _routes(self, num_requests: int, num_rows: int, popular: float, topic: float) -> npt.NDArray[np.int64]:
        """Return a layer's experts [num_requests, num_rows, top_k]."""
        experts, top_k = self.routing.num_experts, self.routing.top_k
        draw = self._rng.standard_normal
        noise: FloatArray = draw((num_requests, num_rows, experts))
        for i in range(1, num_rows):
            noise[:, i] = FADING * noise[:, i - 1] + np.sqrt(1.0 - FADING**2) * noise[:, i]
        scores = np.sqrt(popular) * draw(experts) + np.sqrt(topic) * draw((num_requests, 1, experts))
        scores = scores + np.sqrt(max(0.0, 1.0 - popular - topic)) * noise
        return np.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]


def _overlap(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float:
    """Return the share of a row's experts that the other array's row takes, too."""
    return float((one[:, :, None] == other[:, None, :]).any(2).mean())
