"""How an engine launches attention: short chunks for few requests, by emulated kernels."""

from __future__ import annotations

import pytest
import torch

from faser_trtllm.engine.gpu.ops import Ops
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.paged_cases import paged_case, run

NUM_SMS = 132


@pytest.mark.parametrize(
    ("num_requests", "num_rows", "deterministic", "split_tokens"),
    [(1, 1, False, 128), (1, 5, False, 128), (17, 1, False, 256), (34, 1, False, 512), (1, 1, True, 512)],
)
def test_few_requests_have_short_chunks(
    num_requests: int, num_rows: int, deterministic: bool, split_tokens: int
) -> None:
    """Bit by bit what the kernel gives for that length of chunks, and for no other."""
    lens = [700] + [20] * (num_requests - 1)
    case = paged_case(torch.Generator().manual_seed(0), [num_rows] * num_requests, lens)
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    out = torch.empty_like(case.q)
    ops = Ops({"verify_attention": module}, lambda: 0, NUM_SMS, deterministic)
    ops.verify_attention(*case.arguments(), out, window=0, max_query_rows=num_rows, max_kv_len=1024)
    tile_rows = 64 if deterministic else 16
    same = [split for split in (128, 256, 512) if torch.equal(out, run(module, case, tile_rows, split))]
    assert same == [split_tokens]
