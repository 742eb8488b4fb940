"""The compact_rows kernel, run on the CPU as it is, against the numpy reference; and on a GPU where there is one."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from faser_trtllm.core.batch import RaggedBatch, keep_rows
from faser_trtllm.errors import InvalidArgumentError
from lab.reference.cuda.compact_rows import compact_rows_reference
from tests.ops.cuda.compact_cases import (
    MAX_SEQ_LEN,
    assert_is_the_reference,
    batch_of,
    check_arbitrary_data,
    listed_rows,
    run,
)
from tests.ops.cuda.emulation import emulated
from tests.support.effort import examples


@st.composite
def prunings(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=0, max_size=6))
    kept = [draw(st.integers(0, n)) for n, _ in requests]
    return requests, kept, sum(kept) + draw(st.integers(0, 5)), draw(st.sampled_from([1, 8, 74, 264]))


@settings(max_examples=examples(150), derandomize=True)
@given(prunings(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_the_kernel_is_the_reference(case, dtype):
    requests, num_kept, bucket, hidden_size = case
    batch = batch_of([n for n, _ in requests], [past for _, past in requests], hidden_size, dtype)
    hidden, positions, cu_q_lens, kv_lens = batch
    arguments = (hidden, positions, listed_rows(cu_q_lens, num_kept, bucket), cu_q_lens, kv_lens)
    assert_is_the_reference(run(emulated("compact_rows"), *arguments), *arguments)


def test_the_reference_is_what_the_host_does():
    """A batch compacted on the device is the batch that keep_rows gives, and what it says of the cache is true."""
    new, past, num_kept = [4, 1, 7, 3], [10, 0, 33, 2], [2, 1, 7, 1]
    hidden, positions, cu_q_lens, kv_lens = batch_of(new, past, 16)
    rows = listed_rows(cu_q_lens, num_kept, sum(num_kept))
    found = run(emulated("compact_rows"), hidden, positions, rows, cu_q_lens, kv_lens)
    num_rows = int(cu_q_lens[-1])
    none, table = np.zeros(0, np.int32), np.zeros((4, 1), np.int32)
    batch = RaggedBatch(
        np.arange(4, dtype=np.int32),
        cu_q_lens.numpy(),
        np.zeros(num_rows, np.int32),
        positions.numpy(),
        none,
        table,
    )
    host = keep_rows(batch, rows.numpy(), num_kept)
    assert found.cu_q_lens.tolist() == host.cu_rows.tolist()
    assert found.positions.tolist() == host.positions.tolist()
    assert found.kv_lens.tolist() == [p + k for p, k in zip(past, num_kept, strict=True)]
    assert found.request_ids.tolist() == [b for b, n in enumerate(num_kept) for _ in range(n)]


def test_dummies_are_behind_every_request():
    hidden, positions, cu_q_lens, kv_lens = batch_of([3, 2], [5, 6], 8)
    found = run(emulated("compact_rows"), hidden, positions, listed_rows(cu_q_lens, [1, 1], 8), cu_q_lens, kv_lens)
    assert found.cu_q_lens.tolist() == [0, 1, 2]
    assert found.positions.tolist() == [5, 6] + [MAX_SEQ_LEN] * 6
    assert found.request_ids.tolist() == [0, 1] + [-1] * 6
    assert (found.hidden[2:] == 0).all()


def test_arbitrary_data_is_harmless():
    check_arbitrary_data(emulated("compact_rows"))


def test_wrong_tensors_are_refused():
    hidden, positions, cu_q_lens, kv_lens = batch_of([3, 2], [5, 6], 8)
    rows = listed_rows(cu_q_lens, [1, 1], 2)
    with pytest.raises(InvalidArgumentError, match=r"positions has shape \[4\]; it must be \[5\]"):
        run(None, hidden, positions[:4], rows, cu_q_lens, kv_lens)
    with pytest.raises(InvalidArgumentError, match=r"cu_q_lens has shape \[2\]; it must be \[3\]"):
        run(None, hidden, positions, rows, cu_q_lens[:2], kv_lens)
    with pytest.raises(InvalidArgumentError, match=r"hidden has type fp64; it must be bf16 or fp16 or fp32"):
        run(None, hidden.double(), positions, rows, cu_q_lens, kv_lens)
    with pytest.raises(InvalidArgumentError, match="ascending"):
        compact_rows_reference(
            hidden.float().numpy(),
            positions.numpy(),
            np.array([3, 1], np.int32),
            cu_q_lens.numpy(),
            kv_lens.numpy(),
            MAX_SEQ_LEN,
        )


@pytest.mark.gpu
def test_on_a_gpu(on_gpu):
    rng = np.random.default_rng()
    module = on_gpu("compact_rows")
    for hidden_size, dtype in ((4096, torch.bfloat16), (75, torch.float16), (2048, torch.float32)):
        new = rng.integers(0, 17, 200)
        num_kept = [int(rng.integers(0, n + 1)) for n in new]
        hidden, positions, cu_q_lens, kv_lens = batch_of(new.tolist(), [3] * 200, hidden_size, dtype)
        rows = listed_rows(cu_q_lens, num_kept, sum(num_kept) + 13)
        arguments = (hidden, positions, rows, cu_q_lens, kv_lens)
        assert_is_the_reference(run(module, *arguments, device="cuda"), *arguments)
    check_arbitrary_data(module, "cuda")
