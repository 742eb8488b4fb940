"""Branches on the CPU engine: their rows have the bits of a chain's, and their KV, copied back, is the chain's."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.partition.core_set import CoreSet
from tests.support.engine_harness import Harness
from tests.support.tiny_model import TinyConfig, TinyModel

NUM_SLOTS, NUM_BRANCHES = 3, 5
CONFIGS = {
    "plain": TinyConfig(num_layers=2, hidden_size=192, intermediate_size=768, max_seq_len=320),
    "window": TinyConfig(num_layers=2, max_seq_len=320, sliding_window=43, head_dim=20, num_heads=6, qk_norm=True),
}


@pytest.fixture(scope="module", params=[(name, size) for name in CONFIGS for size in (16, 32)])
def engine(request, tmp_path_factory):
    name, tokens_per_block = request.param
    path = TinyModel(CONFIGS[name]).write(tmp_path_factory.mktemp("engine") / "target.engine", [0, 2])
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("FASER_CPU_TEAM", "always")
        core_set = stack.enter_context(CoreSet(num_threads=2))
        yield stack.enter_context(
            CpuEngine.open(
                path,
                core_set,
                num_blocks=NUM_SLOTS * -(-320 // tokens_per_block),
                tokens_per_block=tokens_per_block,
                max_batch_size=NUM_SLOTS,
                max_num_tokens=512,
                max_num_branches=NUM_BRANCHES,
            )
        )


class Tree:
    """Passes with branches."""

    def __init__(self, engine):
        self.engine, self.harness = engine, Harness(engine)
        self.table = self.harness.block_table

    def copy(self, *copies):
        self.engine.copy_kv(np.ascontiguousarray(np.array(copies, np.int32).T))

    def run(self, rows, branches):
        """rows: as Harness.run has them; branches: (entry of rows, position, token) -> logits of both."""
        batch, size = self.harness.batch(rows), self.engine.spec.tokens_per_block
        n, first = len(branches), batch.num_rows
        for number, (entry, position, _) in enumerate(branches):
            slot, _, begin, _ = rows[entry]
            row, block = self.table[NUM_SLOTS + number], position // size
            row[: block + 1] = self.table[slot, : block + 1]
            row[block] = self.engine.spec.num_blocks + number
            if begin > block * size:
                self.copy((self.table[slot, block], row[block], 0, begin - block * size))
        new = first + np.arange(n, dtype=np.int32)
        columns = {
            "slots": NUM_SLOTS + np.arange(n),
            "cu_rows": new + 1,
            "token_ids": [token for _, _, token in branches],
            "positions": [position for _, position, _ in branches],
            "logit_rows": new,
        }
        longer = {name: np.concatenate([getattr(batch, name), column]) for name, column in columns.items()}
        parents = np.array([entry for entry, _, _ in branches], np.int32)
        arrays = {name: column.astype(np.int32) for name, column in longer.items()}
        logits = self.engine.forward(replace(batch, **arrays, branch_parents=parents))
        return logits[:, : self.engine.spec.vocab_size].copy()


@pytest.mark.parametrize("num_known", [20, 31, 32, 33, 47])
def test_a_branch_row_has_the_bits_of_a_chain_row(engine, num_known):
    """Branches at several places of two requests, around the ends of pages and blocks."""
    rng = np.random.default_rng(num_known)
    vocab_size = engine.spec.vocab_size
    texts = [rng.integers(0, vocab_size, num_known + 8).tolist() for _ in range(2)]
    tree = Tree(engine)
    branches = [
        (0, num_known, 1),
        (0, num_known + 3, 2),
        (1, num_known, 3),
        (1, num_known + 1, 4),
        (1, num_known + 6, 5),
    ]

    def alone(text, end):
        """The last row's logits, a row at a time."""
        plain = Harness(engine, seed=9)
        return [plain.run([(0, text[:end], i, i + 1)])[0][0] for i in range(end)][-1]

    wanted = [alone([*texts[entry][:position], token], position + 1) for entry, position, token in branches]
    chain = [alone(text, num_known + 7) for text in texts]
    for slot, text in enumerate(texts):
        tree.harness.run([(slot, text, 0, num_known - 1)])
    rows = [(slot, text, num_known - 1, num_known + 7) for slot, text in enumerate(texts)]
    logits = tree.run(rows, branches)
    np.testing.assert_array_equal(logits[[7, 15]], chain)
    np.testing.assert_array_equal(logits[16:], wanted)


def test_kv_that_is_copied_back_goes_on_as_the_chain_would(engine):
    rng = np.random.default_rng(1)
    known, size = 30, engine.spec.tokens_per_block
    text = rng.integers(0, engine.spec.vocab_size, known + 6).tolist()
    for place in (0, 1, 2, 3):
        tree = Tree(engine)
        tree.harness.run([(0, text, 0, known - 1)])
        position = known + place
        tree.run([(0, text, known - 1, known + 5)], [(0, position, 7)])
        block, offset = divmod(position, size)
        tree.copy((engine.spec.num_blocks, tree.table[0, block], offset, offset + 1))
        said = [*text[:position], 7, 3, 2]
        found = tree.harness.run([(0, said, position + 1, position + 3)])[0]
        plain = Harness(engine, seed=5)
        plain.run([(0, said, 0, position + 1)])
        np.testing.assert_array_equal(found, plain.run([(0, said, position + 1, position + 3)])[0])


def test_what_is_no_branch_is_refused(engine):
    tree = Tree(engine)
    rows = [(0, [1, 2, 3], 0, 3)]
    tree.run(rows, [(0, 2, 4)])
    with pytest.raises(InvalidArgumentError):  # of a request that is not there
        tree.run(rows, [(-1, 2, 4)])
    for copies in ([0, 10**6, 0, 1], [-1, 0, 0, 1], [0, 1, 3, 2], [0, 1, 0, engine.spec.tokens_per_block + 1]):
        with pytest.raises(InvalidArgumentError):
            tree.copy(copies)
