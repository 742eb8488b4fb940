"""A small run of every kernel of plugins/cuda, through all of its barriers. What is right, the ops' tests say."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch

from faser_trtllm import native
from faser_trtllm.ops.cuda import append_kv, early_exit, gated_silu, prune_rows, quantize_rows, take_step
from faser_trtllm.ops.cuda import verify_attention as attention
from faser_trtllm.ops.cuda.compact_rows import CompactedRows, compact_rows
from faser_trtllm.ops.cuda.experts.route_rows import Routes
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.sample import Draws
from faser_trtllm.ops.cuda.set_conditional import set_conditional
from tests.ops.cuda.accept_batches import FIELDS as ACCEPT_FIELDS
from tests.ops.cuda.accept_batches import SMALL_PART, FewBlocks, SmallBlocks, run_every_mode
from tests.ops.cuda.append_cases import append_case, normed_case
from tests.ops.cuda.compact_cases import batch_of, listed_rows
from tests.ops.cuda.copied_tokens import compare
from tests.ops.cuda.emulation import EmulatedModule, emulated
from tests.ops.cuda.exit_cases import EPS, inputs
from tests.ops.cuda.experts.cases import combine_case, grouped_case, random_case, swiglu_case, whole_case
from tests.ops.cuda.paged_cases import paged_case
from tests.ops.cuda.products.case import Case as MatmulCase
from tests.ops.cuda.prune_cases import boundary_batch
from tests.ops.cuda.sample_cases import FIELDS, SampleCase

Results = Iterator[torch.Tensor | np.ndarray]


def module_of(stem: str, order: int = 0) -> EmulatedModule:
    """The module that the stem's case runs on: with small blocks where the kernel has any size."""
    if stem in ("accept", "sample"):
        return FewBlocks(order, stem)
    if stem == "prune_rows":
        return SmallBlocks(order, stem)
    return emulated(stem, {"FASER_HEAD_DIM": 64} if stem == "verify_attention" else None, order)


def accept(module: EmulatedModule) -> Results:
    # One block works on a row, then three.
    for sizes in ({"vocab_size": 300}, {"vocab_size": 600, "part_entries": SMALL_PART}):
        found = run_every_mode(module, 3, **sizes)
        yield from (getattr(found, name) for name in ACCEPT_FIELDS)


def append(module: EmulatedModule) -> Results:
    for fp8 in (False, True):
        generator = torch.Generator().manual_seed(1)
        case = append_case(generator, [3, 0, 1], [20, 4, 40], fp8=fp8, dummies=1)
        append_kv.launch(module, *case.arguments())
        yield from case.tensors()
        norm = normed_case(case, 1032, generator, has_bias=True, has_norms=True)
        append_kv.launch(module, *case.arguments(), norm=norm)
        yield from case.tensors()


def compact(module: EmulatedModule) -> Results:
    hidden, positions, cu_q_lens, kv_lens = batch_of([5, 9, 1], [1, 2, 3], 300)
    rows = listed_rows(cu_q_lens, [3, 2, 1], 8)
    shapes = [(n,) for n in (8, 8, 4, 3)]
    kept = CompactedRows(torch.zeros(8, 300).to(hidden.dtype), *(torch.zeros(n, dtype=torch.int32) for n in shapes))
    compact_rows(module, hidden, positions, rows, cu_q_lens, kv_lens, 512, kept=kept)
    yield from kept


def copy(module: EmulatedModule) -> Results:
    yield compare(module, (4, 5, 2, 16, 64), torch.bfloat16, 2, 3)


def score(module: EmulatedModule) -> Results:
    for dtype, hidden_size in ((torch.bfloat16, 320), (torch.float16, 75)):
        arguments = inputs(3, num_rows=4, hidden_size=hidden_size, dtype=dtype)
        arguments[1][1] = -1  # a row that does not exist
        scores, (rank, gap) = torch.zeros(4, 8), (torch.zeros(4, dtype=kind) for kind in (torch.int32, torch.float32))
        early_exit.early_exit(module, *arguments, EPS, scores=scores, rank=rank, gap=gap)
        yield from (scores, rank, gap)


def activate(module: EmulatedModule) -> Results:
    generator = torch.Generator().manual_seed(2)
    hidden, gate_up, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 520), (2, 272), 272))
    out, rows = torch.zeros(2, 136).bfloat16(), scaled_rows(2, 136)
    gated_silu.launch(module, gate_up, hidden, bias, EPS, out)
    gated_silu.launch_scaled(module, gate_up, hidden, bias, EPS, rows)
    yield from (out, rows.values, rows.scales)


def multiply(module: EmulatedModule) -> Results:
    """More copies than are in flight, and more rows than sums are kept of."""
    for num_rows, tile_rows, width in ((3, 16, 1032), (18, 64, 520), (70, 128, 136)):
        yield MatmulCase.random(num_rows, 24, width, has_addend=True, has_bias=True).run(module, tile_rows)


def route(module: EmulatedModule) -> Results:
    """More rows than a block sorts at a time."""
    for num_rows in (5, 300):
        yield from tensors_of(random_case(num_rows, num_rows - 2, 40, 3, 264).run(module))
    yield from tensors_of(whole_case(5, 3, 8, 2, has_bias=True).run(module))


def clamp(module: EmulatedModule) -> Results:
    yield swiglu_case([2, 0, 3], 1, 2056).run(module)


def multiply_groups(module: EmulatedModule) -> Results:
    """More groups than a warp has lanes, and more copies than are in flight."""
    for tile_rows, width in ((16, 1032), (64, 520), (128, 136)):
        yield grouped_case([2, 0, 18, *[0] * 31, 3], 1, 24, width).run(module, tile_rows)
        yield grouped_case([2, 0, 18], 1, 24, width // 32 * 32, is_mxfp4=True).run(module, tile_rows)


def combine(module: EmulatedModule) -> Results:
    yield combine_case(4, 3, 2, 1032, has_shared=True).run(module)
    yield combine_case(4, 3, 2, 1032, has_bias=True).run(module)


def prune(module: EmulatedModule) -> Results:
    scores, batch = boundary_batch(0, [7] * 15 + [0] * 5, [10])
    drafts = np.concatenate([[0], np.cumsum(batch.num_rows - 1)]).astype(np.int32)
    arrays = (scores, batch.places, batch.rule.before, drafts, batch.starts, batch.rule.weights())
    kept, rows = (torch.zeros(n, dtype=torch.int32) for n in (20, batch.num_hidden + 9))
    prune_rows.prune_rows(module, *map(torch.from_numpy, arrays), batch.num_hidden, kept=kept, rows=rows)
    yield from (kept, rows)


def quantize(module: EmulatedModule) -> Results:
    x, hidden = torch.randn((2, 2, 2064), generator=torch.Generator().manual_seed(4)).bfloat16()
    for add in (False, True):
        rows = scaled_rows(2, 2064)
        if add:
            quantize_rows.launch_add(module, x, hidden, rows)
        else:
            quantize_rows.launch(module, x, rows)
        yield from (rows.values, rows.scales, hidden)


def sample(module: EmulatedModule) -> Results:
    greedy = {"mode": native.GREEDY}
    # More requests than sample_advance has threads, and a few with all modes and filters, by one block and by three.
    rough = {"mode": native.SEEDED, "temperature": 1e-31}  # no time of its race can be estimated
    few, cut = SampleCase(FIELDS, 300, 2, 1), SampleCase([*FIELDS[:-1], rough], 600, 2, 1, part_entries=SMALL_PART)
    for case in (few, cut, SampleCase([greedy] * 260, 2, 1, 2, max_requests=260)):
        case.run(module)
        yield from list(tensors_of(dataclasses.replace(case.draws, workspace=None)))[1:]  # the entries hold addresses
        yield from (case.stop.pending, case.stop.survival, case.stop.num_going, case.slots.tokens)


def condition(module: EmulatedModule) -> Results:
    handle = ctypes.c_uint32(77)  # the emulator's handles are addresses
    set_conditional(module, torch.tensor([3], dtype=torch.int32), ctypes.addressof(handle))
    yield torch.tensor([handle.value])


def take(module: EmulatedModule) -> Results:
    newest, known, remaining = torch.tensor([[5, 6, 7], [8, 9, 3], [1, 0, 2]], dtype=torch.int32)
    shapes = ((6,), (6,), (6,), (5,), (6,), (5, 200))
    found = take_step.StepInputs(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
    table = torch.arange(600, dtype=torch.int32).view(3, 200)
    take_step.take_step(module, newest, known, remaining, table, found)
    yield from tensors_of(found)


def attend(module: EmulatedModule) -> Results:
    """Both tiles, both types of the cache; one block for many items, whose contexts are cut into chunks, which a block
    does alone or several share, and both ways to merge those."""
    for kv_dtype in ("bf16", "e4m3"):
        for tile_rows in attention.TILE_ROWS:
            generator = torch.Generator().manual_seed(5)
            sizes = {"num_heads": 2, "num_kv_heads": 1, "kv_dtype": kv_dtype, "num_rows_of_nobody": 1}
            case = paged_case(generator, [3, 0, 1], [40, 7, 700], **sizes)
            shape = attention.shape_of(*case.arguments())
            enough = attention.choose_max_slots(shape, 700, 64)
            for max_slots, in_place in ((0, False), (shape.num_rows, False), (enough, False), (enough, True)):
                out = torch.zeros_like(case.q)
                workspace = torch.zeros(attention.workspace_bytes(shape, max_slots) // 4)
                options = {"tile_rows": tile_rows, "max_slots": max_slots, "workspace": workspace, "split_tokens": 64}
                options["in_place"] = in_place
                attention.launch(module, *case.arguments(), out, num_sms=1, **options)
                yield out
                out = torch.zeros_like(case.q)
                attention.launch(module, *case.arguments(), out, num_sms=1, sinks=torch.tensor([0.5, 2.0]), **options)
                yield out


CASES: dict[str, Callable[[EmulatedModule], Results]] = {
    "accept": accept,
    "append_kv": append,
    "clamped_swiglu": clamp,
    "combine_rows": combine,
    "compact_rows": compact,
    "copy_kv": copy,
    "early_exit": score,
    "gated_silu": activate,
    "grouped_matmul": multiply_groups,
    "matmul": multiply,
    "prune_rows": prune,
    "quantize_rows": quantize,
    "route_rows": route,
    "sample": sample,
    "set_conditional": condition,
    "take_step": take,
    "verify_attention": attend,
}


def results_of(stem: str, order: int = 0, shared_byte: int = 0xFF) -> list[bytes]:
    """Return the exact bytes that the stem's case writes."""
    module = module_of(stem, order)
    module.shared_byte = shared_byte
    found = (torch.as_tensor(result) for result in CASES[stem](module))
    return [result.view(torch.uint8).numpy().tobytes() for result in found]


def scaled_rows(num_rows: int, width: int) -> ScaledRows:
    return ScaledRows(torch.zeros(num_rows, width).to(torch.float8_e4m3fn), torch.zeros(num_rows, 1))


def tensors_of(value: Draws | take_step.StepInputs | Routes) -> Iterator[torch.Tensor]:
    found = (getattr(value, field.name) for field in dataclasses.fields(value))
    return (each for each in found if each is not None)
