"""A case of gated_silu, and how close results must be."""

from __future__ import annotations

import torch

from faser_trtllm.ops.cuda import gated_silu as op
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from lab.reference.cuda.gated_silu import gated_silu_reference
from tests.ops.cuda.paged_cases import TORCH_TYPES

EPS = 1e-5


class Case:
    """A product of rows of very different sizes that were not normalized."""

    def __init__(self, num_rows: int, inner: int, hidden_size: int, dtype: str, has_bias: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kind = TORCH_TYPES[dtype]
        sizes = 2.0 ** torch.randint(-6, 7, (num_rows, 1), generator=generator)
        self.hidden = (torch.randn((num_rows, hidden_size), generator=generator) * sizes).to(kind)
        gate_up = 3 * torch.randn((num_rows, 2 * inner), generator=generator) * sizes
        self.gate_up = gate_up.to(torch.float32 if dtype == "fp16" else kind)
        self.bias = torch.randn(2 * inner, generator=generator).to(kind) if has_bias else None
        self.inner = inner

    def run(self, launcher, device: str = "cpu") -> torch.Tensor:
        """Return what the kernel writes and check that memory after the last row is unchanged."""
        gate_up, hidden = self.gate_up.to(device), self.hidden.to(device)
        bias = None if self.bias is None else self.bias.to(device)
        out = torch.full((len(hidden) + 1, self.inner), 7.0, dtype=hidden.dtype, device=device)
        op.launch(launcher, gate_up, hidden, bias, EPS, out[:-1])
        assert (out[-1] == 7).all()
        return out[:-1].cpu()

    def reference(self) -> torch.Tensor:
        out = torch.empty((len(self.hidden), self.inner), dtype=self.hidden.dtype)
        gated_silu_reference(self.gate_up, self.hidden, self.bias, EPS, out)
        return out


def run_scaled(case: Case, launcher, device: str = "cpu") -> ScaledRows:
    """Return what the kernel writes in e4m3 and check that memory after the last row is unchanged."""
    num_rows = len(case.hidden)
    values = torch.full((num_rows + 1, case.inner), 7.0, device=device).to(torch.float8_e4m3fn)
    scales = torch.full((num_rows + 1, 1), 7.0, device=device)
    bias = None if case.bias is None else case.bias.to(device)
    out = ScaledRows(values[:-1], scales[:-1])
    op.launch_scaled(launcher, case.gate_up.to(device), case.hidden.to(device), bias, EPS, out)
    assert (values[-1].float() == 7).all()
    assert scales[-1] == 7
    return ScaledRows(out.values.cpu(), out.scales.cpu())


def assert_same(found: ScaledRows, wanted: ScaledRows) -> None:
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    step = 2**-7 if found.dtype is torch.bfloat16 else 2**-9
    torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=1e-5)
