"""Batches with rows to drop, and compact_rows by any launcher next to its reference."""

import numpy as np
import torch

from faser_trtllm.ops.cuda.compact_rows import CompactedRows, compact_rows
from lab.reference.cuda.compact_rows import compact_rows_reference

MAX_SEQ_LEN = 512


def batch_of(rows_per_request, past, hidden_size, dtype=torch.bfloat16, seed=0):
    """hidden, positions, cu_q_lens, kv_lens of requests with this many new rows behind this many old ones."""
    cu_q_lens = np.cumsum([0, *rows_per_request]).astype(np.int32)
    positions = [np.arange(p, p + n) for n, p in zip(rows_per_request, past, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(int(cu_q_lens[-1]), hidden_size, generator=generator).to(dtype)
    kv_lens = np.array(past, np.int32) + np.array(rows_per_request, np.int32)
    positions = np.concatenate([np.zeros(0), *positions]).astype(np.int32)
    return hidden, torch.tensor(positions), torch.tensor(cu_q_lens), torch.tensor(kv_lens, dtype=torch.int32)


def listed_rows(cu_q_lens, num_kept, bucket):
    starts = cu_q_lens[:-1].tolist()
    rows = [row for start, n in zip(starts, num_kept, strict=True) for row in range(start, start + n)]
    return torch.tensor(rows + [-1] * (bucket - len(rows)), dtype=torch.int32)


def run(launcher, hidden, positions, rows, cu_q_lens, kv_lens, device="cpu"):
    num_kept, num_requests = rows.numel(), kv_lens.numel()
    memory = [
        torch.full((num_kept + 1, hidden.shape[1]), 7, dtype=hidden.dtype, device=device),
        *(torch.full((n + 1,), 77, dtype=torch.int32, device=device) for n in (num_kept, num_kept)),
        *(torch.full((n + 1,), 77, dtype=torch.int32, device=device) for n in (num_requests + 1, num_requests)),
    ]
    kept = CompactedRows(*(tensor[:-1] for tensor in memory))
    tensors = [tensor.to(device) for tensor in (hidden, positions, rows, cu_q_lens, kv_lens)]
    compact_rows(launcher, *tensors, MAX_SEQ_LEN, kept=kept)
    assert (memory[0][-1] == 7).all(), "written behind the last row"
    assert all(tensor[-1] == 77 for tensor in memory[1:])
    return CompactedRows(*(tensor.cpu() for tensor in kept))


def assert_is_the_reference(found, hidden, positions, rows, cu_q_lens, kv_lens):
    arrays = (hidden.float().numpy(), positions.numpy(), rows.numpy(), cu_q_lens.numpy(), kv_lens.numpy())
    wanted = compact_rows_reference(*arrays, MAX_SEQ_LEN)
    for name in CompactedRows._fields:
        np.testing.assert_array_equal(getattr(found, name).float().numpy(), getattr(wanted, name), name)


def check_arbitrary_data(launcher, device="cpu"):
    """Check that, whatever a builder feeds, nothing outside the outputs is touched and lookups stay within bounds."""
    rng = np.random.default_rng(0)
    hidden, positions, cu_q_lens, _ = batch_of([4, 4], [0, 0], 16)
    for _ in range(50):
        rows, cu, lens = (
            torch.tensor(rng.integers(-(2**31), 2**31, n), dtype=torch.int32) for n in (6, cu_q_lens.numel(), 2)
        )
        found = run(launcher, hidden, positions, rows, cu, lens, device)
        assert ((found.cu_q_lens >= 0) & (found.cu_q_lens <= 6)).all()
        assert ((found.request_ids >= -1) & (found.request_ids < 2)).all()
