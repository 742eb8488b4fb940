"""Decoding requests at a segment boundary, and prune_rows by any launcher next to its reference."""

import numpy as np
import torch

from faser_trtllm.core.decision import PruneRule
from faser_trtllm.ops.cuda.prune_rows import prune_rows
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows, prune_rows_reference


def boundary_batch(seed, num_drafts, num_others, num_candidates=8):
    """Decoding requests in any order, with rows of prompts between them."""
    rng = np.random.default_rng(seed)
    blocks = [(i, 1 + n) for i, n in enumerate(num_drafts)] + [(None, n) for n in num_others]
    rng.shuffle(blocks)
    starts, at = np.zeros(len(num_drafts), np.int32), 0
    for request, size in blocks:
        if request is not None:
            starts[request] = at
        at += size
    total = sum(num_drafts)
    scores = rng.standard_normal((total, num_candidates)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    places = rng.integers(0, num_candidates, total).astype(np.int32)
    scores[np.arange(total), places] = rng.standard_normal(total) + 1.0
    rule = PruneRule(rng.normal(2.0, 2.0, total).astype(np.float32), -0.5, -0.8, 1.1, 0.2, float(rng.random()) * 0.9)
    candidates = np.zeros_like(scores, np.int32)
    return scores, PruneBatch(starts, np.array(num_drafts, np.int32) + 1, candidates, places, at, rule)


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
