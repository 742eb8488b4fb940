"""Toy target and draft models whose randomness can be enumerated exactly: distributions are multiples of 1/6.

Every threshold a uniform can be compared with (p / q, running sums of p, q and of the residual) is then a
multiple of 1/60: the midpoints of 60 cells integrate over the uniform exactly.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

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


class ForeignModel(ToyModel):
    """A draft with tokens of its own, whose ids are others: it has all of the target's but token 1, and one more.

    ids: of the target's tokens in its vocabulary; shift: how far the map that it is used through is off. Its law is
    what is left of its own one on the tokens that both have, renormalized.
    """

    ids: ClassVar[dict[int, int]] = {0: 2, 2: 0}
    own_size, replacement = 3, 1

    def __init__(self, seed: int, shift: int = 0, is_renormalized: bool = True) -> None:
        rng = np.random.default_rng(seed)
        shape = (self.own_size, self.own_size)
        first = rng.integers(0, 7, shape) / 6
        ratio = rng.integers(0, 6, shape)
        weights = np.stack([first, np.where(first > 0, first * ratio / (6 - ratio), 1), 1 - first], -1)
        with np.errstate(divide="ignore"):
            self.own_logits = np.log(weights).astype(np.float32)
        self.shift, self.is_renormalized = shift, is_renormalized

    def own_id(self, token: int) -> int:
        return (self.ids.get(token, self.replacement) + self.shift) % self.own_size

    def logits(self, tokens) -> np.ndarray:
        own = self.own_logits[self.own_id(tokens[-2]), self.own_id(tokens[-1])]
        found = np.full(VOCAB_SIZE, -np.inf, np.float32)
        for token in self.ids:
            found[token] = own[self.own_id(token)]
        return found

    def probs(self, tokens) -> np.ndarray:
        """Multiples of 1/6, with either shift, unless they are over its own vocabulary, which is wrong."""
        weights = np.exp(self.logits(tokens).astype(np.float64))
        if self.is_renormalized:
            return weights / weights.sum()
        return weights / np.exp(self.own_logits[self.own_id(tokens[-2]), self.own_id(tokens[-1])]).sum()


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
