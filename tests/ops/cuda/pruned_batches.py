"""Batches with rows to drop, as the compact_rows kernel takes them."""

import numpy as np
import torch

from faser_trtllm.core.decision import PruneRule
from faser_trtllm.ops.prune_rows import PruneBatch


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
