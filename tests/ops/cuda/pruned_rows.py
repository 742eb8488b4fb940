"""prune_rows by any launcher, beside its reference."""

import numpy as np
import torch

from faser_trtllm.ops.cuda.prune_rows import prune_rows
from faser_trtllm.ops.prune_rows import kept_rows, prune_rows_reference


def run(launcher, scores, batch, num_listed, device="cpu"):
    num_drafts = batch.num_rows - 1
    cu_drafts = np.concatenate([[0], np.cumsum(num_drafts)]).astype(np.int32)
    memory = [torch.full((n + 1,), 77, dtype=torch.int32, device=device) for n in (batch.num_rows.size, num_listed)]
    arrays = (scores, batch.places, batch.rule.before, cu_drafts, batch.starts, batch.rule.weights())
    tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    prune_rows(launcher, *tensors, batch.num_hidden, kept=memory[0][:-1], rows=memory[1][:-1])
    assert all(tensor[-1] == 77 for tensor in memory), "written behind the end"
    return memory[0][:-1].cpu().numpy(), memory[1][:-1].cpu().numpy()


def assert_is_the_reference(launcher, scores, batch, num_dummies, device="cpu"):
    kept, rows = run(launcher, scores, batch, batch.num_hidden + num_dummies, device)
    expected = prune_rows_reference(scores, batch)
    np.testing.assert_array_equal(kept, expected)
    listed = kept_rows(batch, expected)
    np.testing.assert_array_equal(rows[: listed.size], listed)
    assert (rows[listed.size :] == -1).all()
    return expected
