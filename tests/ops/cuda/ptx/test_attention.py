"""verify_attention as nvcc's PTX, interpreted: against the reference, against the emulator bit for bit, and broken.

What a GPU computes differs from what is interpreted in the order of a tensor core's sums and in the last bits of ex2
and lg2. Operands, layouts, addresses, copies and barriers are the very text that ptxas gets.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import cycle, product

import pytest
import torch

from faser_trtllm.ops.cuda import verify_attention as op
from lab.reference.cuda.verify_attention import verify_attention_reference
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.paged_cases import NEVER, PagedCase, assert_close, garbage, paged_case, run
from tests.ops.cuda.ptx.interpretation import InterpretedModule, program_of, ptx_of
from tests.ops.cuda.ptx.interpreter.machine import decode
from tests.ops.cuda.ptx.interpreter.program import Program, PtxError
from tests.support.effort import EVERYTHING, pick

pytestmark = pytest.mark.slow

# When the bytes of cp.async arrive, and how far the warps of a block are apart.
WAYS = [
    {"copies_early": early, "warps_apart": order}
    for early, order in ((False, None), (True, None), (False, 1), (True, -1))
]
TYPES = ["bf16", "bf16_e4m3", "fp16", "fp16_e4m3"]


def case_of(types: str, seed: int, rows: Sequence[int], lens: Sequence[int], head_dim: int = 64) -> PagedCase:
    """Ragged requests over permuted blocks, groups of three heads, rows of nobody."""
    dtype, _, kv_dtype = types.partition("_")
    sizes = {"num_heads": 6, "num_kv_heads": 2, "tokens_per_block": 16, "num_rows_of_nobody": 1, "head_dim": head_dim}
    return paged_case(torch.Generator().manual_seed(seed), rows, lens, dtype=dtype, kv_dtype=kv_dtype or dtype, **sizes)


KERNELS = pick([("sm_90", 64)], [("sm_80", 64), *[("sm_90", head_dim) for head_dim in op.HEAD_DIMS]])


# By default each type with one of the tiles, and each way with one of the types.
INSTANCES = pick(list(zip(TYPES, cycle(op.TILE_ROWS), strict=False)), list(product(TYPES, op.TILE_ROWS)))


@pytest.mark.parametrize(("types", "tile_rows"), INSTANCES)
@pytest.mark.parametrize(("arch", "head_dim"), KERNELS)
def test_every_kernel(memory, arch, head_dim, types, tile_rows):
    """Whole and in chunks, with a window and without, and where rows see those after them; one way of the four per
    kernel, in turn, or all of them."""
    program = program_of("verify_attention", arch, FASER_HEAD_DIM=head_dim)
    case = case_of(types, 0, [3, 0, 6], [40, 7, 130], head_dim)
    scales = {"k_scale": 0.5, "v_scale": 3.0} if types.endswith("e4m3") else {}
    turn = TYPES.index(types) + 2 * op.TILE_ROWS.index(tile_rows)
    for number, way in enumerate(WAYS):
        if number != turn % len(WAYS) and not (EVERYTHING and (arch, head_dim) == ("sm_90", 64)):
            continue
        module = InterpretedModule(program, memory, **way)
        in_chunks = (64, (33, op.BUT_FIRST)[number % 2], True)
        for split_tokens, window, is_causal in ((NEVER, 0, True), in_chunks, ((NEVER, 64)[number % 2], 33, False)):
            mask = {"window": window, "is_causal": is_causal}
            wanted = verify_attention_reference(*case.arguments(), **mask, **scales)
            found = run(module, case, tile_rows, split_tokens, in_place=number % 2 == 0, **mask, **scales)
            assert_close(found, wanted, types.partition("_")[0], 3.0)


@pytest.mark.parametrize(
    ("kv_dtype", "tile_rows"), pick([("bf16", 16), ("e4m3", 64)], product(("bf16", "e4m3"), (16, 64)))
)
def test_sinks(memory, kv_dtype, tile_rows):
    """Whole rows, and chunks that a tile's last block merges or a second launch does."""
    module = InterpretedModule(program_of("verify_attention", FASER_HEAD_DIM=64), memory)
    case = case_of("bf16" if kv_dtype == "bf16" else "bf16_e4m3", 0, [3, 0, 6], [40, 7, 130])
    sinks = torch.tensor([0.5, -2.0, 3.0, 1000.0, -1000.0, 0.0])
    for split_tokens, in_place, window in ((NEVER, False, 0), (64, True, 33), (64, False, 0)):
        options = {"sinks": sinks, "window": window}
        wanted = verify_attention_reference(*case.arguments(), **options)
        found = run(module, case, tile_rows, split_tokens, in_place=in_place, **options)
        assert_close(found, wanted, "bf16", 3.0)


def partial_results(module, case: PagedCase, tile_rows: int) -> torch.Tensor:
    """The float32 results of each row and chunk of 64, as bits; NaN where there is none."""
    shape = op.shape_of(*case.arguments())
    slots = op.choose_max_slots(shape, int(case.kv_lens.max()), 64)
    workspace = torch.full((op.workspace_bytes(shape, slots) // 4,), float("nan"))
    options = {"tile_rows": tile_rows, "split_tokens": 64, "max_slots": slots, "num_sms": 2, "workspace": workspace}
    op.launch(module, *case.arguments(), torch.empty_like(case.q), combine=False, **options)
    return workspace[: slots * shape.num_heads * shape.head_dim].view(torch.int32)


@pytest.mark.parametrize(
    ("types", "tile_rows"),
    pick([("bf16", 16), ("fp16_e4m3", 64)], [(types, rows) for types in TYPES for rows in op.TILE_ROWS]),
)
def test_bits_are_the_emulator_s(memory, types, tile_rows):
    """The emulator knows no fused multiplication, so nvcc is told to make none; log2f is another function there."""
    program = program_of("verify_attention", fused=False, FASER_HEAD_DIM=64)
    interpreted = InterpretedModule(program, memory)
    on_host = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    case = case_of(types, 1, [3, 0, 6], [40, 7, 130])
    found, wanted = (partial_results(module, case, tile_rows) for module in (interpreted, on_host))
    assert (wanted.view(torch.float32).isfinite().sum() > 3000).item()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("tile_rows", op.TILE_ROWS)
def test_arbitrary_data_stays_within_the_tensors(memory, tile_rows):
    """Whatever a builder feeds, addresses stay within the tensors, even in reads, which the emulator does not check."""
    module = InterpretedModule(program_of("verify_attention", FASER_HEAD_DIM=64), memory, max_steps=500_000)
    for seed in range(pick(3, 30)):
        generator = torch.Generator().manual_seed(seed)
        case = paged_case(generator, [3, 0, 5], [20, 30, 40], tokens_per_block=8)
        for name in ("block_table", "cu_q_lens", "kv_lens"):
            setattr(case, name, garbage(generator, getattr(case, name)))
        run(module, case, tile_rows, 64, max_slots=(8, 11, 32)[seed % 3], in_place=seed % 2 == 0)


@functools.cache
def _text_of(types: str, tile_rows: int) -> str:
    """Return the text of one kernel and of all that precedes the first kernel, without comments."""
    whole = re.sub(r"//.*", "", ptx_of("verify_attention", "sm_90", True, {"FASER_HEAD_DIM": 64}))
    entries = re.split(r"(?=^\.visible \.entry )", whole, flags=re.MULTILINE)
    (mine,) = [entry for entry in entries if f" verify_attention_{types}_h64_m{tile_rows}(" in entry]
    return entries[0] + mine


MMA = r"(mma\.sync\S+ \{[^}]*\}, )\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}, \{(%r\d+), (%r\d+)\}"
COPY = r"cp\.async\.cg(\S+ \[%r\d+)(\], \[%rd\d+\]), 16, (%r\d+);"
MUTANTS = {
    "two operands of A are swapped": (MMA, r"\1{\2, \4, \3, \5}, {\6, \7}"),
    "two others of A are swapped": (MMA, r"\1{\3, \2, \4, \5}, {\6, \7}"),
    "the operands of B are swapped": (MMA, r"\1{\2, \3, \4, \5}, {\7, \6}"),
    "two results are swapped": (r"(mma\.sync\S+ \{%f\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    "a transposition is missing": (r"\.x4\.trans", ".x4"),
    "a transposition is too many": (r"\.x4\.shared", ".x4.trans.shared"),
    "two registers of ldmatrix are swapped": (r"(ldmatrix\S+ \{%r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
    "ldmatrix reads the next row": (r"(ldmatrix\S+ \{[^}]*\}, \[%r\d+)\]", r"\1+128]"),
    "a group too few is waited for": (r"cp\.async\.wait_group 4;", "cp.async.wait_group 5;"),
    "no group is waited for": (r"cp\.async\.wait_group \d+;", ""),
    "groups are not closed": (r"cp\.async\.commit_group;", ""),
    "half of a source is copied": (COPY, r"cp.async.cg\1\2, 16, 8;"),
    "a source has too many bytes": (COPY, r"cp.async.cg\1\2, 16, 32;"),
    "half of a target is written": (COPY, r"cp.async.ca\1\2, 8, 8;"),
    "a copy goes where the next one belongs": (COPY, r"cp.async.cg\1+16\2, 16, \3;"),
    "a barrier is missing": (r"(wait_group 4;\s*)bar\.sync\s+0;", r"\1"),
    "a lane asks another one": (r"shfl\.sync\.bfly", "shfl.sync.down"),
}


def is_right(program: Program, types: str, tile_rows: int, memory, way) -> bool:
    """Return whether a kernel keeps PTX's rules and computes what the reference does."""
    case = case_of(types, 2, [11], [140])
    module = InterpretedModule(program, memory, max_steps=200_000, **way)
    try:
        found = run(module, case, tile_rows, max_slots=0)
    except PtxError:
        return False
    try:
        assert_close(found, verify_attention_reference(*case.arguments()), types.partition("_")[0], 2.0)
    except AssertionError:
        return False
    return True


FEW_MUTANTS = [
    "two operands of A are swapped",
    "the operands of B are swapped",
    "a transposition is missing",
    "two registers of ldmatrix are swapped",
    "a group too few is waited for",
    "half of a source is copied",
    "half of a target is written",
    "a barrier is missing",
]


@pytest.mark.parametrize("mutant", pick(FEW_MUTANTS, list(MUTANTS)))
@pytest.mark.parametrize(("types", "tile_rows"), pick([("bf16", 64)], [("bf16", 64), ("fp16_e4m3", 16)]))
def test_a_broken_text_is_found(memory, mutant, types, tile_rows):
    """In one way at least of those that the right text is run in."""
    if mutant == "a barrier is missing" and tile_rows == 16:
        pytest.skip("a warp waits for its own lanes, which run together here; tests/ops/cuda/barriers tells")
    right = _text_of(types, tile_rows)
    broken, number = re.subn(*MUTANTS[mutant], right)
    assert number > 0
    program = Program(broken)
    decode(program.kernel(*program.names))  # it can be read: what is found is what it does
    assert not all(is_right(program, types, tile_rows, memory, way) for way in WAYS)


@pytest.mark.parametrize(("types", "tile_rows"), pick([("bf16", 64)], [("bf16", 64), ("fp16_e4m3", 16)]))
def test_the_text_that_is_not_broken_is_right(memory, types, tile_rows):
    assert all(is_right(Program(_text_of(types, tile_rows)), types, tile_rows, memory, way) for way in WAYS)
