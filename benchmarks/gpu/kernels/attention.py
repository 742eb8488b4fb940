"""Cases of append_kv and verify_attention: decode, verification and context, with torch's attention as the peer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.machine import num_copies
from faser_trtllm.ops.cuda import append_kv, verify_attention
from faser_trtllm.ops.cuda.tensors import PagedKv
from lab.reference.cuda.append_kv import append_kv_reference
from lab.reference.cuda.verify_attention import verify_attention_reference

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_PER_BLOCK = 32
# Relative to the result: P is rounded to bf16 before the product with V, and so is the result.
BF16_ERROR = 2e-2


@dataclass(frozen=True)
class AttentionCase:
    """A case with batch_size requests of context_len tokens each, the last num_rows of which are new."""

    batch_size: int
    num_rows: int
    context_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def label(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.batch_size} x {self.num_rows} rows, context {self.context_len}, {heads}"


TARGET, SMALL, DRAFT = (32, 8, 128), (32, 8, 64), (16, 4, 64)  # heads of an 8B, a 1B and a 0.3B
TARGET_HIDDEN, DRAFT_HIDDEN = 4096, 1024
APPEND_CONTEXT = 1024
PASS_CONTEXT = 512  # tokens before the rows of a pass
BATCHES = (1, 32, 128)
CASES = (
    *(
        AttentionCase(batch, rows, context, *TARGET)
        for batch, context in ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 1024), (128, 1024))
        for rows in (1, 5)
    ),
    # Less than a chunk of 512 positions, a full one, as in a pass a few more, and two.
    *(
        AttentionCase(batch, rows, context, *TARGET)
        for batch in BATCHES
        for rows in (1, 5)
        for context in (448, 512, PASS_CONTEXT + rows, 640)
    ),
    *(AttentionCase(batch, 1, context, *DRAFT) for batch in BATCHES for context in (448, PASS_CONTEXT + 1)),
    *(AttentionCase(batch, rows, 1024, *SMALL) for batch in (1, 8, 64) for rows in (1, 5)),
    AttentionCase(16, 9, 2048, *TARGET),
    AttentionCase(8, 9, 8192, *TARGET),  # merged by a second launch
    AttentionCase(1, 512, 512, *TARGET),
    AttentionCase(1, 2048, 4096, *TARGET),
)
DRY_CASES = (AttentionCase(2, 1, 40, 4, 2, 64), AttentionCase(1, 5, 20, 4, 2, 64))


def attention_cases(bench: Bench) -> Iterator[KernelCase]:
    for case in DRY_CASES if bench.is_dry else CASES:
        yield _verify_case(bench, case)


def append_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield cases of append_kv, and with a hidden size of append_kv_normed, which passes of `cuda` launch."""
    if bench.is_dry:
        for hidden_size in (0, 64):
            yield _append_case(bench, AttentionCase(2, 3, APPEND_CONTEXT, 4, 2, 64), hidden_size)
        return
    for batch_size, num_rows in ((1, 1), (8, 5), (128, 5), (1, 2048)):
        yield _append_case(bench, AttentionCase(batch_size, num_rows, max(APPEND_CONTEXT, num_rows), *TARGET), 0)
    for batch_size in BATCHES:
        for num_rows in (1, 5):
            yield _append_case(bench, AttentionCase(batch_size, num_rows, APPEND_CONTEXT, *TARGET), TARGET_HIDDEN)
        yield _append_case(bench, AttentionCase(batch_size, 1, APPEND_CONTEXT, *DRAFT), DRAFT_HIDDEN)


@dataclass
class _Inputs:
    q: Tensor
    kv: PagedKv
    out: Tensor
    keys: Tensor  # [batch_size, num_kv_heads, context_len, head_dim]: the cache, contiguous, for the peer
    values: Tensor


def _inputs(bench: Bench, case: AttentionCase, seed: int) -> _Inputs:
    import torch

    machine = bench.machine
    generator = machine.generator(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=machine.device).bfloat16()

    blocks_per_seq = -(-case.context_len // TOKENS_PER_BLOCK)
    num_blocks = case.batch_size * blocks_per_seq
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(machine.device)
    table = order.view(case.batch_size, blocks_per_seq).to(torch.int32)
    caches: Any = [noise(num_blocks, case.num_kv_heads, TOKENS_PER_BLOCK, case.head_dim) for _ in range(2)]
    dense: Any = [
        cache[table.long()].transpose(1, 2).flatten(2, 3)[:, :, : case.context_len].contiguous() for cache in caches
    ]
    q = noise(case.batch_size * case.num_rows, case.num_heads, case.head_dim)
    starts = torch.arange(case.batch_size + 1, device=machine.device, dtype=torch.int32) * case.num_rows
    lens = torch.full((case.batch_size,), case.context_len, dtype=torch.int32, device=machine.device)
    return _Inputs(q, PagedKv(caches[0], caches[1], table, starts, lens), torch.full_like(q, float("nan")), *dense)


def _verify_case(bench: Bench, case: AttentionCase) -> KernelCase:
    import torch

    machine = bench.machine
    cache_bytes = 4 * case.batch_size * case.context_len * case.num_kv_heads * case.head_dim
    num_q = case.batch_size * case.num_rows * case.num_heads * case.head_dim
    sets = [_inputs(bench, case, i) for i in range(min(16, num_copies(cache_bytes, machine.l2_bytes)))]
    launcher = machine.launcher("verify_attention", {"FASER_HEAD_DIM": case.head_dim})
    shape = verify_attention.shape_of(sets[0].q, sets[0].kv)
    how = verify_attention.AttentionLaunch.choose(shape, case.num_rows, case.context_len, machine.num_sms)
    workspace = torch.empty(max(4, how.workspace_bytes) // 4, device=machine.device)

    def launch(inputs: _Inputs) -> None:
        assert launcher is not None
        verify_attention.launch(
            launcher,
            inputs.q,
            inputs.kv,
            inputs.out,
            tile_rows=how.tile_rows,
            split_tokens=how.split_tokens,
            max_slots=how.max_slots,
            num_sms=machine.num_sms,
            workspace=workspace,
            in_place=how.in_place,
        )

    def check() -> float:
        inputs = sets[0]
        wanted = verify_attention_reference(inputs.q, inputs.kv)
        if launcher is None:
            inputs.out.copy_(wanted)
        else:
            launch(inputs)
        machine.synchronize()
        return relative_error(inputs.out, wanted) / BF16_ERROR

    seen = case.context_len - (case.num_rows - 1) / 2  # mean positions that a row attends to
    pieces = _pieces(case, shape, how)
    num_partial = case.batch_size * case.num_rows * len(pieces) if len(pieces) > 1 else 0
    return KernelCase(
        "verify_attention",
        case.label,
        check,
        _calls(launch, sets) if launcher is not None else None,
        cache_bytes + 4 * num_q,
        4 * num_q * seen,
        tuple(_peer(case, inputs) for inputs in sets),
        more_bytes=2 * verify_attention.workspace_bytes(shape, num_partial),  # written and read
        walks=pieces,
    )


def _pieces(
    case: AttentionCase, shape: verify_attention.AttentionShape, how: verify_attention.AttentionLaunch
) -> tuple[tuple[int, int], ...]:
    """Return the number and the tokens of the parts that a context is cut into, for each KV head and tile of rows."""
    num_packed = case.num_rows * shape.group
    number = case.batch_size * case.num_kv_heads * -(-num_packed // how.tile_rows)
    if not how.max_slots or num_packed > verify_attention.MAX_SPLIT_ROWS:
        return ((number, case.context_len),)
    before_last = verify_attention.num_chunks(case.context_len, how.split_tokens) - 1
    last = case.context_len - before_last * how.split_tokens
    return (*((number, how.split_tokens),) * before_last, (number, last))


def _peer(case: AttentionCase, inputs: _Inputs) -> Callable[[], object]:
    """Return scaled_dot_product_attention on a contiguous cache, which no server has."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    q = inputs.q.view(case.batch_size, case.num_rows, case.num_heads, case.head_dim).transpose(1, 2).contiguous()
    bias = causal_lower_right(case.num_rows, case.context_len) if case.num_rows > 1 else None
    group = case.num_heads // case.num_kv_heads
    if bias is None:
        # The heads of a group share keys; as queries of one head they read keys once.
        packed = q.view(case.batch_size, case.num_kv_heads, group, case.head_dim)
        return lambda: torch.nn.functional.scaled_dot_product_attention(packed, inputs.keys, inputs.values)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, inputs.keys, inputs.values, attn_mask=bias, enable_gqa=group > 1
    )


def append_shape(case: AttentionCase, hidden_size: int) -> str:
    """Return the shape's name in reports; hidden_size 0: append_kv itself."""
    return f"normed, {case.label}" if hidden_size else case.label


def _append_case(bench: Bench, case: AttentionCase, hidden_size: int) -> KernelCase:
    import torch

    machine = bench.machine
    inputs = _inputs(bench, case, 0)
    num_rows = case.batch_size * case.num_rows
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    copies = num_copies(2 * num_rows * width, machine.l2_bytes)
    generator = machine.generator(1)
    qkvs = [torch.randn(num_rows, width, generator=generator, device=machine.device).bfloat16() for _ in range(copies)]
    angles = torch.outer(torch.arange(case.context_len).float(), 1e4 ** -torch.linspace(0, 1, case.head_dim // 2))
    cos, sin = angles.cos().to(machine.device), angles.sin().to(machine.device)
    first = case.context_len - case.num_rows
    positions = (torch.arange(num_rows, device=machine.device) % case.num_rows + first).to(torch.int32)
    launcher = machine.launcher("append_kv")
    rope, norm = append_kv.Rope(cos, sin, positions), None
    if hidden_size:
        hidden = torch.randn(num_rows, hidden_size, generator=generator, device=machine.device).bfloat16()
        norm = append_kv.QkvNorm(hidden, 1e-5)

    def launch(qkv: Tensor) -> None:
        assert launcher is not None
        append_kv.launch(launcher, qkv, rope, inputs.kv, inputs.out, norm=norm)

    def check() -> float:
        wanted = [torch.empty_like(inputs.out), inputs.kv.k_cache.clone(), inputs.kv.v_cache.clone()]
        kv = inputs.kv._replace(k_cache=wanted[1], v_cache=wanted[2])
        append_kv_reference(qkvs[0], rope, kv, wanted[0], norm=norm)
        found = [inputs.out, inputs.kv.k_cache, inputs.kv.v_cache]
        if launcher is None:
            for to, of in zip(found, wanted, strict=True):
                to.copy_(of)
        else:
            launch(qkvs[0])
        machine.synchronize()
        return max(relative_error(to, of) for to, of in zip(found, wanted, strict=True)) / BF16_ERROR

    return KernelCase(
        "append_kv",
        append_shape(case, hidden_size),
        check,
        _calls(launch, qkvs) if launcher is not None else None,
        num_rows * (4.0 * width + 2.0 * hidden_size),
    )


def _calls(launch: Callable[..., None], sets: list[_Inputs] | list[Tensor]) -> tuple[Callable[[], object], ...]:
    return tuple(lambda item=item: launch(item) for item in sets)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm; infinite if `found` contains NaN."""
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20)
    value = float(difference)
    return value if math.isfinite(value) else math.inf
