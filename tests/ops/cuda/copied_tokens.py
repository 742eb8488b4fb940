"""Caches for copy_kv, and the kernel by any launcher against the reference."""

from __future__ import annotations

import torch

from faser_trtllm.ops.cuda.copy_kv import copy_kv
from faser_trtllm.ops.cuda.driver import Launcher
from lab.reference.cuda.copy_kv import copy_kv_reference

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(
    launcher: Launcher, shape: tuple[int, ...], dtype: torch.dtype, num_copies: int, seed: int, device: str = "cpu"
) -> torch.Tensor:
    """Copies between blocks of which each is in one copy only, as far as there are enough -> what the kernel left."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(shape[1], generator=generator)[: 2 * min(num_copies, shape[1] // 2)].view(2, -1)
    offsets = torch.randint(0, shape[3] + 1, (2, blocks.shape[1]), generator=generator).sort(0).values
    copies = torch.cat((blocks, offsets)).to(torch.int32)
    found, wanted = (random_cache(shape, dtype, seed) for _ in range(2))
    on_device = found.to(device)
    copy_kv(launcher, copies.to(device), on_device)
    found = on_device.cpu()
    copy_kv_reference(copies, wanted)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    return found
