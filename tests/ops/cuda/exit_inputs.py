"""Random hidden rows and candidates for the early_exit kernels."""

import numpy as np
import torch

EPS = 1e-5


def inputs(
    seed, *, num_hidden_rows=7, num_rows=5, hidden_size=64, vocab_size=50, num_candidates=8, dtype=torch.bfloat16
):
    rng = np.random.default_rng(seed)
    hidden = torch.tensor(rng.standard_normal((num_hidden_rows, hidden_size)) * 3).to(dtype)
    final_norm = torch.tensor(rng.standard_normal(hidden_size) * 0.3 + 1).to(dtype)
    lm_head = torch.tensor(rng.standard_normal((vocab_size, hidden_size))).to(dtype)
    rows = rng.integers(0, num_hidden_rows, num_rows).astype(np.int32)
    candidates = rng.integers(0, vocab_size, (num_rows, num_candidates)).astype(np.int32)
    places = rng.integers(0, num_candidates, num_rows).astype(np.int32)
    return [hidden, torch.tensor(rows), final_norm, lm_head, torch.tensor(candidates), torch.tensor(places)]
