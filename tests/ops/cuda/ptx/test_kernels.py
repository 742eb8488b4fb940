"""Every kernel of plugins/cuda as nvcc's PTX, interpreted, against the op's reference.

By default for sm_90 with a case each; with FASER_TEST_ALL=1 for sm_80 too, in every order of a block's warps. The
attention has a file of its own.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
import torch

from faser_trtllm import native
from faser_trtllm.ops.cuda import append_kv, copy_kv
from faser_trtllm.ops.cuda.accept import PART_ENTRIES
from faser_trtllm.ops.cuda.compiler import stems
from faser_trtllm.ops.cuda.quantize_rows import launch_add, quantize_rows
from faser_trtllm.ops.cuda.set_conditional import set_conditional
from faser_trtllm.ops.cuda.take_step import StepInputs, take_step
from lab.reference.accept import accept_reference
from lab.reference.cuda.append_kv import append_kv_reference
from lab.reference.cuda.take_step import take_step_reference
from tests.ops.cuda import (
    accept_batches,
    append_cases,
    compact_cases,
    copied_tokens,
    exit_cases,
    prune_cases,
    quantized_rows,
    sample_cases,
    silu_case,
)
from tests.ops.cuda.accept_batches import SMALL_BLOCK, SmallLaunches
from tests.ops.cuda.compact_cases import batch_of, listed_rows
from tests.ops.cuda.experts import cases as expert_cases
from tests.ops.cuda.paged_cases import garbage
from tests.ops.cuda.products import case as matmul_case
from tests.ops.cuda.ptx.interpretation import InterpretedModule, program_of
from tests.support.effort import pick
from tests.support.sampling_slots import Slots

every_way = pytest.mark.parametrize(
    ("arch", "order"), pick([("sm_90", None)], [("sm_90", None), ("sm_90", 1), ("sm_90", -1), ("sm_80", None)])
)


@every_way
def test_take_step(memory, arch, order):
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 5, shape, generator=generator, dtype=torch.int32)

    requests = random(4), random(4) + 1, random(4), random(4, 9)
    shapes = ((8,), (8,), (8,), (6,), (7,), (6, 10))
    found, wanted = (StepInputs(*(torch.full(shape, 77, dtype=torch.int32) for shape in shapes)) for _ in range(2))
    module = InterpretedModule(program_of("take_step", arch), memory, warps_apart=order)
    take_step(module, *requests, found)
    take_step_reference(*requests, wanted)
    for field in dataclasses.fields(found):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name


class OfPositions:
    """prune_rows as a TensorRT plugin launches it: with an argument more, which is not read."""

    def __init__(self, module: InterpretedModule) -> None:
        self._module = module

    def launch(self, kernel, grid, block, arguments, stream=0) -> None:
        more = [*arguments[:6], ctypes.c_void_p(None), *arguments[6:]]
        self._module.launch(f"{kernel}_of_positions", grid, block, more)


@every_way
def test_set_conditional(memory, arch, order):
    """The one kernel that calls a function: the driver's, here the test's."""
    calls = []
    functions = {"cudaGraphSetConditional": lambda handle, value: calls.append((handle, value))}
    module = InterpretedModule(program_of("set_conditional", arch), memory, warps_apart=order, functions=functions)
    set_conditional(module, torch.tensor([3], dtype=torch.int32), 1 << 40)
    set_conditional(module, None, 5)
    set_conditional(module, torch.tensor([-1], dtype=torch.int32), 7)
    assert calls == [(1 << 40, 3), (7, 0xFFFFFFFF)]


@every_way
def test_prune_rows(memory, arch, order):
    module = InterpretedModule(program_of("prune_rows", arch), memory, warps_apart=order)
    scores, batch = prune_cases.boundary_batch(3, [4, 1, 6, 0, 9], [2, 5])
    for launcher in (module, OfPositions(module)):
        kept = prune_cases.assert_is_the_reference(launcher, scores, batch, 3)
        assert 0 < (kept == batch.num_rows).sum() < kept.size


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compact_rows(memory, arch, order, dtype):
    hidden, positions, cu_q_lens, kv_lens = batch_of([4, 1, 7, 3], [10, 0, 33, 2], 74, dtype)
    arguments = (hidden, positions, listed_rows(cu_q_lens, [2, 1, 7, 1], 14), cu_q_lens, kv_lens)
    module = InterpretedModule(program_of("compact_rows", arch), memory, warps_apart=order)
    compact_cases.assert_is_the_reference(compact_cases.run(module, *arguments), *arguments)


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_early_exit(memory, arch, order, dtype):
    module = InterpretedModule(program_of("early_exit", arch), memory, warps_apart=order)
    for hidden_size in (64, 75):  # 75 is not a whole number of packs
        arguments = exit_cases.inputs(1, hidden_size=hidden_size, dtype=dtype)
        found = exit_cases.run(module, arguments)
        exit_cases.assert_equal_but_for_rounding(found, exit_cases.expected(arguments))
    if dtype is torch.bfloat16:
        exit_cases.check_what_does_not_exist(module)


@every_way
def test_quantize_rows(memory, arch, order):
    module = InterpretedModule(program_of("quantize_rows", arch), memory, warps_apart=order)
    for x in (quantized_rows.random_rows(3, 2064, 1), quantized_rows.every_number(448.0)[::50]):
        x = x.contiguous()
        quantized_rows.assert_same(quantized_rows.run(module, x), quantize_rows(x))
        sums, rows = x.flip(0).contiguous(), quantized_rows.run(module, x)
        launch_add(module, x, sums, rows)
        assert torch.equal(sums, x + x.flip(0))
        quantized_rows.assert_same(rows, quantize_rows(sums))


@every_way
def test_route_rows(memory, arch, order):
    module = InterpretedModule(program_of("route_rows", arch), memory, warps_apart=order)
    for case in (
        expert_cases.whole_case(11, 9, 40, 3, 264),
        expert_cases.whole_case(3, 3, 8, 2, over_all=True, others=1),
        expert_cases.whole_case(3, 3, 8, 2, has_bias=True),
    ):
        expert_cases.assert_same_routes(case.run(module), case.run(None))


@every_way
def test_combine_rows(memory, arch, order):
    module = InterpretedModule(program_of("combine_rows", arch), memory, warps_apart=order)
    for options in ({"has_shared": True}, {"has_bias": True}):
        case = expert_cases.combine_case(3, 2, 2, 1032, **options)
        torch.testing.assert_close(case.run(module).float(), case.run(None).float(), rtol=2**-7, atol=1e-5)


@every_way
def test_clamped_swiglu(memory, arch, order):
    module = InterpretedModule(program_of("clamped_swiglu", arch), memory, warps_apart=order)
    case = expert_cases.swiglu_case([2, 0, 3], 1, 2056)
    torch.testing.assert_close(case.run(module).float(), case.run(None).float(), rtol=2**-7, atol=1e-5)


@every_way
@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_grouped_matmul(memory, arch, order, is_mxfp4):
    """All tiles, which give the same bits; more groups than a warp has lanes."""
    module = InterpretedModule(program_of("grouped_matmul", arch), memory, warps_apart=order)
    case = expert_cases.grouped_case([2, 0, 18, *[0] * 31, 3], 1, 24, 160 if is_mxfp4 else 136, is_mxfp4=is_mxfp4)
    found = [case.run(module, tile_rows) for tile_rows in (16, 64, 128)]
    matmul_case.assert_near(found[0], case.run(None))
    assert all(torch.equal(each, found[0]) for each in found)


@every_way
@pytest.mark.parametrize("types", [("bf16", "bf16"), ("fp16", "fp32")])
def test_matmul(memory, arch, order, types):
    """All tiles, which give the same bits."""
    module = InterpretedModule(program_of("matmul", arch), memory, warps_apart=order)
    case = matmul_case.Case.random(18, 24, 136, types, has_addend=True, has_bias=True)
    found = [case.run(module, tile_rows) for tile_rows in (16, 64, 128)]
    matmul_case.assert_near(found[0], case.reference())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@every_way
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gated_silu(memory, arch, order, dtype):
    module = InterpretedModule(program_of("gated_silu", arch), memory, warps_apart=order)
    case = silu_case.Case(2, 72, 64, dtype, True, 1)
    silu_case.assert_near(case.run(module), case.reference())
    if dtype == "bf16":
        quantized = quantize_rows(case.run(module))
        silu_case.assert_same(silu_case.run_scaled(case, module), quantized)


@every_way
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp8", [False, True])
def test_append_kv(memory, arch, order, dtype, fp8):
    generator = torch.Generator().manual_seed(2)
    module = InterpretedModule(program_of("append_kv", arch), memory, warps_apart=order)
    sizes = {"heads": (4, 2), "head_dim": 80, "dtype": dtype, "fp8": fp8}
    wanted = append_cases.append_case(generator, [2, 0, 1], [10, 4, 40], dummies=1, **sizes)
    found = wanted.copy()
    scales = {"k_scale": 0.25, "v_scale": 0.01} if fp8 else {}
    append_kv_reference(*wanted.arguments(), **scales)
    append_kv.launch(module, *found.arguments(), **scales)
    append_cases.assert_same(found, wanted)

    wanted = append_cases.append_case(generator, [2, 1], [10, 40], **sizes)
    norm = append_cases.normed_case(wanted, 64, generator, has_bias=True, has_norms=True)
    found = wanted.copy()
    append_kv_reference(*wanted.arguments(), norm=norm)
    append_kv.launch(module, *found.arguments(), norm=norm)
    append_cases.assert_near(found, wanted)


@every_way
@pytest.mark.parametrize("fp8", [False, True])
def test_append_kv_to_branches(memory, arch, order, fp8):
    case, norm, first_branch = append_cases.branch_case(3, fp8=fp8)
    module = InterpretedModule(program_of("append_kv", arch), memory, warps_apart=order)
    found = case.copy()
    append_kv_reference(*case.arguments(), norm=norm, first_branch=first_branch)
    append_kv.launch(module, *found.arguments(), norm=norm, first_branch=first_branch)
    append_cases.assert_near(found, case)


@every_way
@pytest.mark.parametrize("dtype", copied_tokens.DTYPES)
def test_copy_kv(memory, arch, order, dtype):
    module = InterpretedModule(program_of("copy_kv", arch), memory, warps_apart=order)
    copied_tokens.compare(module, (3, 5, 2, 32, 80), dtype, 2, 1)


@every_way
def test_sample(memory, arch, order):
    """All but two logarithms are equal bit for bit, over two steps in all modes, with one and two blocks a row."""
    program = program_of("sample", arch, **SMALL_BLOCK)
    module = SmallLaunches(InterpretedModule(program, memory, warps_apart=order))
    for vocab_size, part_entries in ((150, PART_ENTRIES), (300, accept_batches.SMALL_PART)):
        sizes = {"part_entries": part_entries}
        found, wanted = (sample_cases.SampleCase(sample_cases.FIELDS, vocab_size, 2, 5, **sizes) for _ in range(2))
        for array in found.slots.arrays():
            memory.add_array(array)
        sample_cases.assert_same(found.run(module), wanted.run(None))


@every_way
@pytest.mark.parametrize("dtype", pick([torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(("vocab_size", "part_entries"), [(150, PART_ENTRIES), (300, accept_batches.SMALL_PART)])
def test_accept(memory, arch, order, dtype, vocab_size, part_entries):
    """All results are equal bit for bit in all modes, for drafts of model and text, with one and two blocks a row."""
    program = program_of("accept", arch, **SMALL_BLOCK)
    module = SmallLaunches(InterpretedModule(program, memory, warps_apart=order))
    rng = np.random.default_rng(3)
    n = 7
    slots = Slots(n, vocab_size, 1)
    slots.draft_probs[:] = rng.dirichlet(np.ones(vocab_size), (n, 1))
    for slot in range(n):
        fields = {"top_k": 50 * (slot % 2), "top_p": 0.9 if slot % 3 else 1.0, "temperature": 4.0}
        edits = {"frequency_penalty": 0.2, "bad_words": [[3], [5, 6]], "bias": [(7, 2.0)]} if slot % 5 == 0 else {}
        mode = accept_batches.MODES[slot % 3]
        slots.set(slot, tokens=rng.integers(0, vocab_size, 9), mode=mode, key=slot, **fields, **edits)
    slots.draft_sources[4:] = native.BY_SUFFIX
    for array in slots.arrays():
        memory.add_array(array)
    logits = torch.from_numpy(np.round(rng.standard_normal((n, vocab_size)) * 2)).to(dtype)
    ones = np.ones(n, np.int32)
    rest = (vocab_size, np.arange(n + 1, dtype=np.int32), 8 * ones, ones, 1)
    every = np.arange(n, dtype=np.int32)
    wanted = accept_reference(slots.array, every, logits.float().numpy(), *rest)
    found = accept_batches.run(module, slots.array, every, logits, *rest, part_entries=part_entries)
    for name in accept_batches.FIELDS:
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name


def test_arbitrary_data_is_harmless(memory):
    """Whatever a builder feeds, addresses stay within the tensors, even in reads, which the emulator does not check."""
    module = InterpretedModule(program_of("compact_rows"), memory, max_steps=100_000)
    compact_cases.check_arbitrary_data(module)
    module = InterpretedModule(program_of("append_kv"), memory, max_steps=100_000)
    for seed in range(pick(6, 60)):
        generator = torch.Generator().manual_seed(seed)
        case = append_cases.append_case(generator, [2, 0, 1], [10, 4, 40], fp8=seed % 2 > 0)
        norm = append_cases.normed_case(case, 64, generator, has_bias=True, has_norms=True) if seed % 3 == 0 else None
        for name in ("positions", "cu_q_lens", "block_table", "kv_lens"):
            setattr(case, name, garbage(generator, getattr(case, name)))
        branches = None if norm is None else garbage(generator, case.cu_q_lens)
        append_kv.launch(module, *case.arguments(), norm=norm, first_branch=branches)
    module = InterpretedModule(program_of("copy_kv"), memory, max_steps=100_000)
    for seed in range(pick(6, 60)):
        copies = garbage(torch.Generator().manual_seed(seed), torch.zeros((4, 3), dtype=torch.int32))
        copy_kv.copy_kv(module, copies, copied_tokens.random_cache((2, 3, 2, 16, 64), torch.bfloat16, seed))
    module = InterpretedModule(program_of("early_exit"), memory, max_steps=100_000)
    for seed in range(pick(3, 20)):
        arguments = exit_cases.inputs(seed, num_candidates=3)
        generator = torch.Generator().manual_seed(seed)
        for index in (1, 4, 5):
            arguments[index] = garbage(generator, arguments[index])
        exit_cases.run(module, arguments)


def test_no_kernel_is_left_out():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(stems()) <= tested | {"verify_attention"}
