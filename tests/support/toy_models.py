"""Toy target and draft models whose randomness can be enumerated exactly: distributions are multiples of 1/6.

Every threshold a uniform can be compared with (p / q, running sums of p, q and of the residual) is then a
multiple of 1/60: the midpoints of 60 cells integrate over the uniform exactly.
"""

from __future__ import annotations

import itertools

import numpy as np

VOCAB_SIZE = 3
CELLS = 60

_DISTRIBUTIONS = np.array([probs for probs in itertools.product(range(7), repeat=VOCAB_SIZE) if sum(probs) == 6])


class ToyModel:
    """The next token's distribution depends on the last two tokens; some tokens are impossible."""

    def __init__(self, seed: int) -> None:
        choices = np.random.default_rng(seed).integers(0, len(_DISTRIBUTIONS), (VOCAB_SIZE, VOCAB_SIZE))
        self.table = _DISTRIBUTIONS[choices] / 6

    def probs(self, tokens) -> np.ndarray:
        return self.table[tokens[-2], tokens[-1]]

    def logits(self, tokens) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(self.probs(tokens)).astype(np.float32)


def target_probs(target: ToyModel, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """The distribution of the next `length` tokens of the target alone."""
    probs = {(): 1.0}
    for _ in range(length):
        probs = {
            (*tokens, token): probability * target.probs((*prompt, *tokens))[token]
            for tokens, probability in probs.items()
            for token in range(VOCAB_SIZE)
        }
    return probs


def total_variation(a: dict, b: dict) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())
