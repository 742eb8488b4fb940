"""A guide over toy tokens: an automaton that reads token ids."""

import numpy as np

from faser_trtllm.core.guide import GuideError


class ToyGuide:
    """A deterministic automaton, drawn at random: in a state some tokens lead on, and in some states it may end.

    edges: state -> {token: state}. An end id is in no edge.
    """

    def __init__(self, edges, accepting, vocab_size, fails_at=None):
        self.edges = edges
        self.accepting = accepting
        self.vocab_size = vocab_size
        self.fails_at = fails_at
        self.num_fills = 0

    @classmethod
    def random(cls, vocab_size, seed, end_id, num_states=6):
        rng = np.random.default_rng(seed)
        tokens = [t for t in range(vocab_size) if t != end_id]
        edges = {}
        for state in range(num_states):
            allowed = [t for t in tokens if rng.random() < 0.6] or tokens[:1]
            edges[state] = {t: int(rng.integers(num_states)) for t in allowed}
        return cls(edges, {s for s in range(num_states) if rng.random() < 0.3}, vocab_size)

    def allowed(self, output, end_ids):
        """The tokens that may follow an output, from the definition; None if the output itself is not allowed."""
        state = 0
        for token in output:
            if token not in self.edges[state]:
                return None
            state = self.edges[state][token]
        return set(self.edges[state]) | (set(end_ids) if state in self.accepting else set())

    def start(self, end_ids):
        return ToyState(self, tuple(end_ids))


class ToyState:
    def __init__(self, guide, end_ids):
        self._guide = guide
        self._end_ids = end_ids
        self._path = [0]

    def advance(self, token_ids):
        for token in token_ids:
            assert token in self._guide.edges[self._path[-1]], "a token that no mask allowed"
            self._path.append(self._guide.edges[self._path[-1]][token])

    def rollback(self, num_tokens):
        assert 0 <= num_tokens < len(self._path)
        del self._path[len(self._path) - num_tokens :]

    def fill(self, mask):
        self._guide.num_fills += 1
        if len(self._path) - 1 == self._guide.fails_at:
            raise GuideError("the grammar takes too long")
        allowed = set(self._guide.edges[self._path[-1]]) | (set(self._end_ids) if self.is_complete else set())
        bits = np.zeros(32 * mask.size, np.uint8)
        bits[list(allowed)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    @property
    def is_complete(self):
        return self._path[-1] in self._guide.accepting
