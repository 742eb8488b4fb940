"""Tests of the hidden rows that a draft head reads of a target in plans: those of named layers, by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.core.batch import keep_rows
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.models.reference import ReferenceModel
from tests.engine.tensorrt.files import BLOCK, SEGMENTS, make_networks, open_engine, trt
from tests.engine.tensorrt.stand_in import make_stand_in
from tests.support.engine_harness import Harness
from tests.support.networks import make_model

# The embedding, a boundary between segments, a layer inside one, and what leaves the last.
READ_LAYERS = (0, 1, 2, 4)
NUM_SLOTS, LONGEST = 4, 96


@pytest.mark.parametrize("flavour", ["native", "plugin"])
def test_passes_keep_them(tmp_path: Path, flavour: str) -> None:
    """Whole, in chunks, and by segments between which rows are dropped; native attention orders rows by cache row."""
    model = make_model(tmp_path, "qwen2")
    networks, built = make_networks(model, flavour, SEGMENTS, read_layers=READ_LAYERS)
    stand_in = make_stand_in(tmp_path / "rank0.engine", trt, networks, built, SEGMENTS)
    size = BLOCK if flavour == "plugin" else LONGEST
    width = model[0].hidden_size
    kept = HiddenRows(
        HostRuntime(), READ_LAYERS, width, torch.float32, num_blocks=NUM_SLOTS * LONGEST // size, tokens_per_block=size
    )
    reference = ReferenceModel(*model)

    def expected(tokens: list[int]) -> torch.Tensor:
        rows = reference.hidden_rows(tokens)
        return torch.cat([rows[layer] for layer in READ_LAYERS], -1)

    with open_engine(stand_in, hidden_rows=kept) as engine:
        target = Harness(engine, seed=3)

        def found(slot: int, count: int) -> torch.Tensor:
            places = np.arange(count)
            blocks = target.block_table[slot, places // size].astype(np.int64)
            return kept.tensor[torch.from_numpy(blocks * size + places % size)]

        def check(slot: int, tokens: list[int], count: int) -> None:
            torch.testing.assert_close(found(slot, count), expected(tokens[:count]), atol=5e-5, rtol=5e-5)

        vocab = engine.spec.vocab_size
        first, second, third = (list(range(start, start + n)) for start, n in ((3, 50), (60, 40), (9, 12)))
        assert max(*first, *second, *third) < vocab
        target.run([(2, first, 0, 33), (0, second, 0, 7)])
        target.run([(0, second, 7, 40), (2, first, 33, 50)])
        check(2, first, 50)
        check(0, second, 40)
        fourth = second[:5] + third
        batch = target.batch([(3, third, 0, 12), (0, fourth, 5, 9)])
        for segment in range(len(SEGMENTS) - 1):
            engine.run_segment(batch, segment)
            if segment == 1:
                rows = np.r_[:9, 12:14].astype(np.int32)  # three rows of the first go, and two of the second
                engine.compact_rows(rows)
                batch = keep_rows(batch, rows, [9, 2])
        check(3, third, 9)
        check(0, fourth, 7)
