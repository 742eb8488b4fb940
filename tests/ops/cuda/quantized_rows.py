"""Rows for quantize_rows, and the kernel by any launcher."""

from __future__ import annotations

import torch

from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, launch


def run(launcher, x: torch.Tensor) -> ScaledRows:
    """Return what the kernel writes and check that memory after the last row is unchanged."""
    num_rows, width = x.shape
    values = torch.full((num_rows + 1, width), 7.0, device=x.device).to(torch.float8_e4m3fn)
    scales = torch.full((num_rows + 1, 1), 7.0, device=x.device)
    found = ScaledRows(values[:-1], scales[:-1])
    launch(launcher, x, found)
    assert (values[-1].float() == 7).all()
    assert scales[-1] == 7
    return found


def assert_same(found: ScaledRows, wanted: ScaledRows) -> None:
    assert torch.equal(found.scales, wanted.scales)
    a, b = found.values.float(), wanted.values.float()
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


def random_rows(num_rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-40, 41, (num_rows, 1), generator=generator)
    x = torch.randn(num_rows, width, generator=generator) * 2.0**sizes
    return (x * 2.0 ** torch.randint(-20, 1, x.shape, generator=generator)).bfloat16()


def every_number(beside: float) -> torch.Tensor:
    """Rows [254, 272]: each finite bf16 number once, beside another one, which may set the row's scale."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    finite = bits[bits.isfinite().all(-1)]
    return torch.cat([finite, torch.full((len(finite), 16), beside).bfloat16()], -1)
