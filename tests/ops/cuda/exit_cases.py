"""Random hidden rows and candidates for early_exit, and the kernels by any launcher next to their reference."""

import numpy as np
import torch

from faser_trtllm.ops.cuda.early_exit import early_exit
from lab.reference.cuda.early_exit import early_exit_reference

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


def run(launcher, arguments, device="cpu"):
    num_rows, num_candidates = arguments[4].shape
    arguments = [tensor.to(device) for tensor in arguments]
    scores = torch.full((num_rows + 1, num_candidates), 77.0, device=device)
    rank = torch.full((num_rows + 1,), 77, dtype=torch.int32, device=device)
    gap = torch.full((num_rows + 1,), 77.0, device=device)
    outputs = {"scores": scores[:-1], "rank": rank[:-1], "gap": gap[:-1]}
    early_exit(launcher, *arguments, EPS, **outputs)
    assert (scores[-1] == 77).all(), "written behind the last row"
    assert rank[-1] == gap[-1] == 77
    return [tensor.cpu().numpy() for tensor in outputs.values()]


def expected(arguments):
    floats = [tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in arguments]
    return early_exit_reference(*floats, EPS)


def assert_equal_but_for_rounding(found, wanted):
    (scores, rank, gap), (wanted_scores, wanted_rank, wanted_gap) = found, wanted
    scale = np.abs(wanted_scores[np.isfinite(wanted_scores)]).max(initial=1)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-5, atol=1e-5 * scale)
    assert rank.tolist() == wanted_rank.tolist()
    np.testing.assert_allclose(gap, wanted_gap, rtol=1e-5, atol=2e-5 * scale)


def check_what_does_not_exist(launcher, device="cpu"):
    arguments = inputs(3, num_rows=8)
    _, rows, _, _, candidates, places = arguments
    rows[1], rows[2] = -1, 7
    candidates[3] = -1
    candidates[4, 2:] = -1
    candidates[5, 0], candidates[5, 1] = 50, -(2**31)
    candidates[6, 3] = 2**31 - 1
    places[4], places[5], places[6], places[7] = 5, 0, 8, -3
    wanted = expected(arguments)
    assert np.isneginf(wanted[0][1]).all()
    assert np.isinf(wanted[2][4:8]).all(), "each of these rows must tell a drafted token without a score"
    assert_equal_but_for_rounding(run(launcher, arguments, device), wanted)
