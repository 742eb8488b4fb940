"""Passes with branches, and what they must compute on every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from faser_trtllm.engine.base import Engine
from tests.support.engine_harness import Harness, Rows

Branch = tuple[int, int, int]  # the entry of the rows that it is a branch of, position, token


class Tree:
    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine, self.harness = engine, Harness(engine, seed)
        self.table = self.harness.block_table

    def copy(self, *copies: tuple[int, int, int, int]) -> None:
        self.engine.copy_kv(np.ascontiguousarray(np.array(copies, np.int32).reshape(-1, 4).T))

    def run(self, rows: Sequence[Rows], branches: Sequence[Branch]) -> np.ndarray:
        """Return logits of the rows, then of the branches."""
        batch, spec = self.harness.batch(rows), self.engine.spec
        size, copies = spec.tokens_per_block, []
        for number, (entry, position, _) in enumerate(branches):
            slot, _, begin, _ = rows[entry]
            row, block = self.table[spec.max_batch_size + number], position // size
            row[: block + 1] = self.table[slot, : block + 1]
            row[block] = spec.num_blocks + number
            if begin > block * size:
                copies.append((int(self.table[slot, block]), int(row[block]), 0, begin - block * size))
        self.copy(*copies)
        new = batch.num_rows + np.arange(len(branches))
        columns = {
            "slots": spec.max_batch_size + np.arange(len(branches)),
            "cu_rows": new + 1,
            "token_ids": [token for _, _, token in branches],
            "positions": [position for _, position, _ in branches],
            "logit_rows": new,
        }
        longer = {
            name: np.concatenate([getattr(batch, name), column]).astype(np.int32) for name, column in columns.items()
        }
        parents = np.array([entry for entry, _, _ in branches], np.int32)
        logits = self.engine.forward(replace(batch, **longer, branch_parents=parents))
        return logits[:, : spec.vocab_size].copy()


def random_texts(count: int, length: int, seed: int, vocab_size: int = 300) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


def check_rows(engine: Engine, num_known: int, prepare: Callable[[], object] = lambda: None) -> None:
    """Branches at several places of two requests have the bits of chains, a row at a time. prepare: called before the
    branches run."""
    texts = random_texts(2, num_known + 8, num_known, engine.spec.vocab_size)
    places = [(0, 0, 1), (0, 3, 2), (1, 0, 3), (1, 1, 4), (1, 6, 5)]
    branches = [(entry, num_known + place, token) for entry, place, token in places]

    def alone(text: list[int], end: int) -> np.ndarray:
        plain = Harness(engine, seed=9)
        return [plain.run([(0, text[:end], i, i + 1)])[0][0] for i in range(end)][-1]

    wanted = [alone([*texts[entry][:position], token], position + 1) for entry, position, token in branches]
    chain = [alone(text, num_known + 7) for text in texts]
    prepare()
    tree = Tree(engine)
    for slot, text in enumerate(texts):
        tree.harness.run([(slot, text, 0, num_known - 1)])
    logits = tree.run([(slot, text, num_known - 1, num_known + 7) for slot, text in enumerate(texts)], branches)
    np.testing.assert_array_equal(logits[[7, 15]], chain)
    np.testing.assert_array_equal(logits[16:], wanted)


def check_copied_kv(engine: Engine) -> None:
    """KV of a branch that is copied back goes on as the chain's would."""
    known, size = 30, engine.spec.tokens_per_block
    (text,) = random_texts(1, known + 6, 1, engine.spec.vocab_size)
    for position in range(known, known + 4):
        tree = Tree(engine)
        tree.harness.run([(0, text, 0, known - 1)])
        tree.run([(0, text, known - 1, known + 5)], [(0, position, 7)])
        block, offset = divmod(position, size)
        tree.copy((engine.spec.num_blocks, int(tree.table[0, block]), offset, offset + 1))
        said = [*text[:position], 7, 3, 2]
        found = tree.harness.run([(0, said, position + 1, position + 3)])[0]
        plain = Harness(engine, seed=5)
        plain.run([(0, said, 0, position + 1)])
        np.testing.assert_array_equal(found, plain.run([(0, said, position + 1, position + 3)])[0])
