"""Branches on the CPU engine: their rows have the bits of a chain's, and their KV, copied back, is the chain's."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.partition.core_set import CoreSet
from tests.engine.cuda.branched import Tree, check_copied_kv, check_rows
from tests.support.tiny_model import TinyConfig, TinyModel

NUM_SLOTS, NUM_BRANCHES = 3, 5
CONFIGS = {
    "plain": TinyConfig(num_layers=2, hidden_size=192, intermediate_size=768, max_seq_len=320),
    "window": TinyConfig(num_layers=2, max_seq_len=320, windows=(43,), head_dim=20, num_heads=6, qk_norm=True),
    "sinks": TinyConfig(num_layers=2, max_seq_len=320, windows=(43, 0), sinks=True),
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


@pytest.mark.parametrize("num_known", [20, 31, 32, 33, 47])
def test_a_branch_row_has_the_bits_of_a_chain_row(engine, num_known):
    """Around the ends of pages and blocks."""
    check_rows(engine, num_known)


def test_kv_that_is_copied_back_goes_on_as_the_chain_would(engine):
    check_copied_kv(engine)


def test_what_is_no_branch_is_refused(engine):
    tree = Tree(engine)
    rows = [(0, [1, 2, 3], 0, 3)]
    tree.run(rows, [(0, 2, 4)])
    with pytest.raises(InvalidArgumentError):  # of a request that is not there
        tree.run(rows, [(-1, 2, 4)])
    for copies in ((0, 10**6, 0, 1), (-1, 0, 0, 1), (0, 1, 3, 2), (0, 1, 0, engine.spec.tokens_per_block + 1)):
        with pytest.raises(InvalidArgumentError):
            tree.copy(copies)
