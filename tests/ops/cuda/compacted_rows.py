"""compact_rows by any launcher, beside its reference."""

import numpy as np
import torch

from faser_trtllm.ops.cuda.compact_rows import CompactedRows, compact_rows, compact_rows_reference
from tests.ops.cuda.pruned_batches import batch_of

MAX_SEQ_LEN = 512


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
    """What a builder may feed: nothing outside the outputs is touched, and lookups stay within bounds."""
    rng = np.random.default_rng(0)
    hidden, positions, cu_q_lens, _ = batch_of([4, 4], [0, 0], 16)
    for _ in range(50):
        rows, cu, lens = (
            torch.tensor(rng.integers(-(2**31), 2**31, n), dtype=torch.int32) for n in (6, cu_q_lens.numel(), 2)
        )
        found = run(launcher, hidden, positions, rows, cu, lens, device)
        assert ((found.cu_q_lens >= 0) & (found.cu_q_lens <= 6)).all()
        assert ((found.request_ids >= -1) & (found.request_ids < 2)).all()
