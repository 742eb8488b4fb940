"""Cases of append_kv, and how close results must be."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from faser_trtllm.ops.cuda import append_kv as op
from faser_trtllm.ops.cuda.tensors import PagedKv
from tests.ops.cuda.paged_cases import TORCH_TYPES

MAX_SEQ_LEN = 96


@dataclass
class AppendCase:
    """Inputs and outputs of append_kv."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    cu_q_lens: torch.Tensor
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    q_rotated: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def arguments(self) -> tuple[torch.Tensor, op.Rope, PagedKv, torch.Tensor]:
        """In the form that launch() and the reference take."""
        kv = PagedKv(self.k_cache, self.v_cache, self.block_table, self.cu_q_lens, self.kv_lens)
        return self.qkv, op.Rope(self.cos, self.sin, self.positions), kv, self.q_rotated

    def copy(self, device: str = "cpu") -> AppendCase:
        return AppendCase(*[tensor.clone().to(device) for tensor in self.tensors()])


def append_case(
    generator, num_rows, kv_lens, *, heads=(4, 2), head_dim=64, tokens_per_block=16, dtype="bf16", fp8=False, dummies=0
) -> AppendCase:
    """New rows at the end of each request's context; dummies are rows of nobody at max_seq_len. Caches hold ones."""
    num_heads, num_kv_heads = heads
    batch_size, total = len(num_rows), sum(num_rows) + dummies
    blocks_per_seq = -(-max(kv_lens) // tokens_per_block) + 1
    num_blocks = batch_size * blocks_per_seq + 1
    table = torch.randperm(num_blocks, generator=generator)[: batch_size * blocks_per_seq].view(batch_size, -1)
    angles = torch.arange(MAX_SEQ_LEN)[:, None] * 10_000 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
    positions = [kv_len - rows + i for rows, kv_len in zip(num_rows, kv_lens, strict=True) for i in range(rows)]
    kv_type = TORCH_TYPES["e4m3" if fp8 else dtype]
    qkv = 4 * torch.randn((total, (num_heads + 2 * num_kv_heads) * head_dim), generator=generator)
    return AppendCase(
        qkv.to(TORCH_TYPES[dtype]),
        angles.cos().float(),
        angles.sin().float(),
        torch.tensor(positions + [MAX_SEQ_LEN] * dummies, dtype=torch.int32),
        torch.tensor([0, *num_rows]).cumsum(0).to(torch.int32),
        table.to(torch.int32),
        torch.tensor(kv_lens, dtype=torch.int32),
        torch.full((total, num_heads, head_dim), float("nan"), dtype=TORCH_TYPES[dtype]),
        torch.ones((num_blocks, num_kv_heads, tokens_per_block, head_dim)).to(kv_type),
        torch.ones((num_blocks, num_kv_heads, tokens_per_block, head_dim)).to(kv_type),
    )


def branch_case(seed: int, *, fp8: bool = False) -> tuple[AppendCase, op.QkvNorm, torch.Tensor]:
    """Requests of 5, 3 and 1 rows, of which the first has three branches around the end of a block, the second one and
    the third none; branches have the blocks of their request, but for the one that holds their place."""
    generator = torch.Generator().manual_seed(seed)
    places = [(0, 15), (0, 17), (0, 18), (1, 40)]
    rows, kv_lens = [5, 3, 1, *[1] * len(places)], [19, 41, 8, *(place + 1 for _, place in places)]
    case = append_case(generator, rows, kv_lens, fp8=fp8)
    for branch, (parent, place) in enumerate(places, 3):
        case.block_table[branch, : place // 16] = case.block_table[parent, : place // 16]
    norm = normed_case(case, 64, generator, has_bias=True, has_norms=True)
    return case, norm, torch.tensor([3, 6, 7, 7, 7, 7, 7, 7], dtype=torch.int32)


def assert_same(found: AppendCase, wanted: AppendCase) -> None:
    """Within one rounding of the type: a GPU fuses the multiplication and addition of the rotation."""
    for name in ("q_rotated", "k_cache", "v_cache"):
        a, b = getattr(found, name), getattr(wanted, name)
        step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3}[a.dtype]
        atol = 2**-9 if a.dtype == torch.float8_e4m3fn else 1e-5
        torch.testing.assert_close(a.float(), b.float(), rtol=step, atol=atol, equal_nan=True)


def assert_near(found: AppendCase, wanted: AppendCase) -> None:
    """A rotation may cancel what was rounded, so the error is one of a head's largest number."""
    for name in ("q_rotated", "k_cache", "v_cache"):
        a, b = getattr(found, name), getattr(wanted, name).float()
        largest = b.abs().amax(-1, keepdim=True).clamp(min=1)
        step = 2**-3 * b.abs() if a.dtype == torch.float8_e4m3fn else 0.0
        assert ((a.float() - b).abs() <= 2**-7 * largest + step).all()


def normed_case(case: AppendCase, hidden_size: int, generator, *, has_bias: bool, has_norms: bool) -> op.QkvNorm:
    """Makes the case's qkv a product of rows that were not normalized, of very different sizes."""
    dtype, (num_rows, _, head_dim) = case.q_rotated.dtype, case.q_rotated.shape
    sizes = 2.0 ** torch.randint(-6, 7, (num_rows, 1), generator=generator)
    hidden = (torch.randn((num_rows, hidden_size), generator=generator) * sizes).to(dtype)
    case.qkv = (case.qkv.float() * sizes).to(torch.float32 if dtype is torch.float16 else dtype)

    def weights(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    bias = weights(case.qkv.shape[1]) if has_bias else None
    return op.QkvNorm(hidden, 1e-5, bias, *((weights(head_dim), weights(head_dim)) if has_norms else ()))
