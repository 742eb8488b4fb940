"""Random ragged batches over a paged KV cache, with the traps a kernel may fall into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from faser_trtllm.ops.cuda import verify_attention as op
from faser_trtllm.ops.cuda.tensors import PagedKv

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
# Of results in units of their size: P is rounded to the type before it meets V, and the result once more.
TOLERANCES = {"bf16": 2e-2, "fp16": 3e-3}


@dataclass
class PagedCase:
    """Inputs of verify_attention. Blocks are permuted; what no row may read is NaN, in blocks of nobody too."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def arguments(self) -> tuple[torch.Tensor, PagedKv]:
        """In the form that launch() and the reference take."""
        return self.q, PagedKv(*self.tensors()[1:])

    def to(self, device: str) -> PagedCase:
        """The same case elsewhere."""
        return PagedCase(*[tensor.to(device) for tensor in self.tensors()])


def paged_case(
    generator: torch.Generator,
    num_rows: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    tokens_per_block: int = 16,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    num_rows_of_nobody: int = 0,
    spread: float = 1.0,
) -> PagedCase:
    """A case of len(num_rows) requests; spread scales the queries, and with them how sharp the attention is."""
    batch_size, total = len(num_rows), sum(num_rows) + num_rows_of_nobody
    blocks_per_seq = max(1, *(-(-length // tokens_per_block) for length in kv_lens)) + 1
    num_blocks = batch_size * blocks_per_seq + 2
    order = torch.randperm(num_blocks, generator=generator)[: batch_size * blocks_per_seq]
    block_table = order.view(batch_size, blocks_per_seq).to(torch.int32)
    caches = []
    for _ in range(2):
        cache = torch.full((num_blocks, num_kv_heads, tokens_per_block, head_dim), float("nan"))
        for b, length in enumerate(kv_lens):
            places = torch.arange(length)
            values = torch.randn((length, num_kv_heads, head_dim), generator=generator)
            cache[block_table[b].long()[places // tokens_per_block], :, places % tokens_per_block] = values
        caches.append(cache.to(TORCH_TYPES[kv_dtype or dtype]))
    q = spread * torch.randn((total, num_heads, head_dim), generator=generator)
    starts = torch.tensor([0, *num_rows]).cumsum(0).to(torch.int32)
    return PagedCase(q.to(TORCH_TYPES[dtype]), *caches, block_table, starts, torch.tensor(kv_lens, dtype=torch.int32))


def garbage(generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """int32 of any size in a tensor's shape, the smallest and largest among them."""
    shape = tuple(like.shape)
    wild = torch.randint(-(2**31), 2**31, shape, generator=generator)
    near = torch.randint(-3, 12, shape, generator=generator)
    edges = torch.tensor([-(2**31), 2**31 - 1, -1, 0])[torch.randint(0, 4, shape, generator=generator)]
    pick = torch.randint(0, 3, shape, generator=generator)
    return torch.where(pick == 0, wild, torch.where(pick == 1, near, edges)).to(torch.int32).to(like.device)


NEVER = 1 << 20  # positions of a chunk that no case here is longer than


def run(module, case: PagedCase, tile_rows: int, split_tokens: int = NEVER, **options) -> torch.Tensor:
    """launch() into memory full of NaNs; max_slots: enough for all, unless given."""
    shape = op.shape_of(
        *case.arguments(), options.get("window", 0), options.get("is_causal", True), options.get("sinks")
    )
    out = torch.full_like(case.q, float("nan"))
    options.setdefault("max_slots", op.choose_max_slots(shape, int(case.kv_lens.max()), split_tokens))
    options.setdefault("num_sms", 2)
    workspace = torch.full((op.workspace_bytes(shape, options["max_slots"]) // 4,), float("nan"), device=case.q.device)
    options |= {"tile_rows": tile_rows, "split_tokens": split_tokens, "workspace": workspace}
    op.launch(module, *case.arguments(), out, **options)
    return out


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: str, size: float = 1.0) -> None:
    """Within the type's tolerance, times the size of V."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance * size, rtol=tolerance)
