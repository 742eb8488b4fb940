"""Rows that requests keep: their values, and how often logits are copied from a GPU for them."""

from types import SimpleNamespace

import numpy as np
import pytest

from faser_trtllm.core.plan import KeptRows
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.kept_rows import Kept, keep_rows
from faser_trtllm.ops.arrays import SAMPLING_DTYPE

VOCAB = 5


class CountedLogits:
    """Stands in for DeviceLogits, each of whose indexings copies all rows to the host."""

    def __init__(self, array):
        self.array, self.num_copies = array, 0

    def __getitem__(self, index):
        self.num_copies += 1
        return self.array[index]


@pytest.mark.parametrize("num_asking", [0, 1, 2, 8])
def test_logits_are_copied_once_for_all_requests_of_a_step(num_asking):
    logits = CountedLogits(np.arange(16 * (VOCAB + 1), dtype=np.float32).reshape(16, VOCAB + 1))
    keeping = [
        Kept(
            index,
            SimpleNamespace(params=SamplingParams(return_generation_logits=index < num_asking), slot=index),
            2 * index,
            [3] * (1 + index % 2),
        )
        for index in range(8)
    ]
    context = {7: KeptRows(context_log_probs=[-1.0])}
    found = keep_rows(keeping, np.zeros(8, SAMPLING_DTYPE), logits, VOCAB, None, context)
    assert logits.num_copies == (num_asking > 0)
    for index in range(8):
        rows = logits.array[2 * index :][: 1 + index % 2, :VOCAB] if index < num_asking else []
        assert np.array_equal(found[index].logits, rows)
        assert not any(np.shares_memory(row, logits.array) for row in found[index].logits), (
            "the pass's buffer is reused"
        )
    assert found[7].context_log_probs == [-1.0]
