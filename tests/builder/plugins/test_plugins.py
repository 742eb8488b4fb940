"""The plugins' descriptors, taken through the calls of a TensorRT build, and what they would launch, run on the CPU."""

from __future__ import annotations

import ctypes
import re
import sys

import numpy as np
import pytest
import torch

from faser_trtllm.builder import plugins
from faser_trtllm.builder.plugins.descriptor import register_plugin
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.ops.cuda import append_kv, verify_attention
from faser_trtllm.ops.cuda.tensors import PagedKv
from faser_trtllm.ops.prune_rows import kept_rows, prune_rows_reference
from lab.reference.cuda.append_kv import append_kv_reference
from lab.reference.cuda.compact_rows import compact_rows_reference
from lab.reference.cuda.early_exit import early_exit_reference
from lab.reference.cuda.verify_attention import verify_attention_reference
from tests.builder.plugins import stand_in
from tests.ops.cuda.compact_cases import batch_of, listed_rows
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.exit_cases import EPS
from tests.ops.cuda.exit_cases import inputs as early_exit_inputs
from tests.ops.cuda.prune_cases import boundary_batch

TORCH_TYPES = {"BF16": torch.bfloat16, "HALF": torch.float16, "INT32": torch.int32, "FLOAT": torch.float32}


class Paged:
    """Three requests with paged caches of 64-wide heads: some rows of each are new."""

    num_kv_heads, tokens_per_block = 2, 16

    def __init__(
        self,
        dtype=torch.bfloat16,
        seed=0,
        num_dummies=2,
        num_heads=8,
        head_dim=64,
        max_seq_len=64,
        past=(10, 0, 21),
    ):
        self.num_heads, self.head_dim, self.max_seq_len = num_heads, head_dim, max_seq_len
        blocks_per_seq = max_seq_len // self.tokens_per_block
        self.num_blocks = 3 * blocks_per_seq
        rng = torch.Generator().manual_seed(seed)
        new = [3, 1, 6]
        num_rows = sum(new) + num_dummies
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = torch.randn(num_rows, width, generator=rng).to(dtype)
        angles = torch.arange(self.max_seq_len)[:, None] * 0.01 ** (torch.arange(self.head_dim // 2) / 32)
        self.cos, self.sin = angles.cos(), angles.sin()
        positions = [p + j for n, p in zip(new, past, strict=True) for j in range(n)]
        self.positions = torch.tensor(positions + [self.max_seq_len] * num_dummies, dtype=torch.int32)
        self.cu_q_lens = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
        self.kv_lens = torch.tensor([n + p for n, p in zip(new, past, strict=True)], dtype=torch.int32)
        self.block_table = torch.randperm(self.num_blocks, generator=rng).view(3, blocks_per_seq).int()
        shape = (self.num_blocks, self.num_kv_heads, self.tokens_per_block, self.head_dim)
        self.k_cache, self.v_cache = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
        self.q = torch.randn(num_rows, self.num_heads, self.head_dim, generator=rng).to(dtype)

    def append_inputs(self):
        tables = (self.positions, self.cu_q_lens, self.block_table, self.kv_lens)
        return [self.qkv, self.cos, self.sin, *tables, self.k_cache, self.v_cache]

    def attention_inputs(self):
        return [self.q, self.k_cache, self.v_cache, self.block_table, self.cu_q_lens, self.kv_lens]


def type_of(trt, tensor):
    names = {dtype: name for name, dtype in TORCH_TYPES.items()}
    return getattr(trt.DataType, names[tensor.dtype])


def plan(trt, plugin_id, tensors, **options):
    return stand_in.plan(trt, plugin_id, [(tuple(t.shape), type_of(trt, t)) for t in tensors], **options)


def outputs_of(planned):
    return [
        torch.zeros(shape, dtype=TORCH_TYPES[dtype.name])
        for shape, dtype in zip(planned.output_shapes, planned.output_types, strict=True)
    ]


def run(launcher, launch, inputs, outputs):
    """Launch as TensorRT does: input pointers, scalars, output pointers."""
    arguments = [ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs]
    arguments += [ctypes.c_int32(value) for value in launch.scalars]
    arguments += [ctypes.c_void_p(tensor.data_ptr()) for tensor in outputs]
    launcher.launch(launch.kernel, launch.grid, launch.block, arguments)


def entry_points(ptx):
    return re.findall(rb"\.entry (\w+)\(", ptx)


def check_code(launch):
    """The PTX has the kernel, for a machine no newer than asked, with as many parameters as will be passed."""
    name = launch.kernel.encode()
    assert name in entry_points(launch.code)
    assert b".target sm_90" in launch.code
    assert launch.shared_mem == 0
    parameters = re.findall(rb"\.param [^,)]*" + name + rb"_param_\d+", launch.code)
    scalars = [p for p in parameters if b".u32" in p or b".s32" in p]
    assert len(scalars) == len(launch.scalars)
    return len(parameters) - len(scalars)


def test_all_are_registered(trt):
    registry = trt.get_plugin_registry()
    assert {f"{c.plugin_namespace}::{c.name}" for c in registry.all_creators} >= set(plugins.PLUGIN_IDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_append_kv(trt, dtype):
    paged = Paged(dtype)
    inputs = paged.append_inputs()
    dynamic = ((0, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0))  # rows, batch and blocks
    planned = plan(trt, "faser::append_kv", inputs, dynamic=dynamic)
    assert planned.output_shapes == [(12, 8, 64), tuple(paged.k_cache.shape), tuple(paged.v_cache.shape)]
    assert planned.output_types == [type_of(trt, paged.qkv)] * 3
    assert planned.aliased_inputs == [-1, -1, -1], "an aliased cache may be copied"
    launch = planned.launches[0]
    assert check_code(launch) == 12
    # One address for a cache's input and output, as the runtime binds them.
    expected = [torch.zeros(12, 8, 64, dtype=dtype), paged.k_cache.clone(), paged.v_cache.clone()]
    qkv, cos, sin, positions, cu_q_lens, block_table, kv_lens = inputs[:7]
    kv = PagedKv(*expected[1:], block_table, cu_q_lens, kv_lens)
    append_kv_reference(qkv, append_kv.Rope(cos, sin, positions), kv, expected[0])
    q_rotated = outputs_of(planned)[0]
    run(emulated("append_kv"), launch, inputs, [q_rotated, paged.k_cache, paged.v_cache])
    for found, wanted in zip((q_rotated, paged.k_cache, paged.v_cache), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-2, atol=1e-2)
    assert not torch.equal(expected[1], Paged(dtype).k_cache), "the reference must have written something"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_verify_attention(trt, dtype):
    """The profile decides the tile: heads of few rows share a small one."""
    dynamic = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))
    for num_dummies, tactic, tile_rows in ((2, 2, 16), (20, 1, 64)):
        paged = Paged(dtype, num_dummies=num_dummies)
        inputs = paged.attention_inputs()
        planned = plan(trt, "faser::verify_attention", inputs, dynamic=dynamic, split_tokens=0)
        assert planned.output_shapes == [tuple(paged.q.shape), (1,)]
        assert planned.tactics == [tactic]
        launch = planned.launches[tactic]
        assert check_code(launch) == 8
        shape = verify_attention.shape_of(inputs[0], PagedKv(*inputs[1:]))
        assert launch.grid == verify_attention.grid(shape, tile_rows)
        assert launch.kernel == verify_attention.kernel_name(shape, tile_rows)
        found = outputs_of(planned)
        run(emulated("verify_attention", {"FASER_HEAD_DIM": 64}), launch, inputs, found)
        expected = verify_attention_reference(inputs[0], PagedKv(*inputs[1:]))
        torch.testing.assert_close(found[0].float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_verify_attention_in_chunks(trt):
    """Two plugins: the first leaves the long contexts' rows in its second output, the other makes them whole."""
    paged = Paged(num_heads=4, head_dim=64, max_seq_len=256, past=(10, 0, 221))
    inputs = paged.attention_inputs()
    shape, split_tokens = verify_attention.shape_of(inputs[0], PagedKv(*inputs[1:])), 64
    slots = verify_attention.choose_max_slots(shape, 256, split_tokens)
    assert slots == 12 * 4
    dynamic = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))
    planned = plan(trt, "faser::verify_attention", inputs, dynamic=dynamic, split_tokens=split_tokens)
    assert planned.output_shapes == [tuple(paged.q.shape), (slots * 4 * 66,)]
    assert [dtype.name for dtype in planned.output_types] == ["BF16", "FLOAT"]
    launch = planned.launches[planned.tactics[0]]
    assert launch.grid == verify_attention.grid(shape, {2: 16, 1: 64}[planned.tactics[0]], slots)
    whole, workspace = outputs_of(planned)
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    run(module, launch, inputs, [whole, workspace])

    sizes = {"num_kv_heads": 2, "tokens_per_block": 16, "max_blocks_per_seq": 16, "split_tokens": split_tokens}
    inputs = [whole, workspace, paged.cu_q_lens, paged.kv_lens]
    dynamic = ((0, 0), (1, 0), (2, 0), (3, 0))
    planned = plan(trt, "faser::verify_attention_combine", inputs, dynamic=dynamic, **sizes)
    assert planned.output_shapes == [tuple(paged.q.shape)]
    launch = planned.launches[0]
    assert check_code(launch) == 5
    assert launch.grid == verify_attention.combine_grid(shape)
    (out,) = outputs_of(planned)
    run(module, launch, inputs, [out])
    q, *kv = paged.attention_inputs()
    expected = verify_attention_reference(q, PagedKv(*kv))
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert not whole[4:10].any(), "the long request's rows come from the workspace"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_early_exit(trt, dtype):
    inputs = early_exit_inputs(1, dtype=dtype)
    planned = plan(trt, "faser::early_exit", inputs, dynamic=((0, 0), (1, 0), (4, 0), (5, 0)), rms_norm_eps=EPS)
    assert planned.output_shapes == [(5, 8), (5,), (5,)]
    assert [dtype.name for dtype in planned.output_types] == ["FLOAT", "INT32", "FLOAT"]
    assert check_code(planned.launches[0]) == 9
    found = outputs_of(planned)
    run(emulated("early_exit"), planned.launches[0], inputs, found)
    arrays = [t.float().numpy() if t.is_floating_point() else t.numpy() for t in inputs]
    for tensor, wanted in zip(found, early_exit_reference(*arrays, EPS), strict=True):
        np.testing.assert_allclose(tensor.numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compact_rows(trt, dtype):
    hidden, positions, cu_q_lens, kv_lens = batch_of([4, 2, 5], [7, 0, 9], 24, dtype)
    inputs = [hidden, positions, listed_rows(cu_q_lens, [2, 1, 5], 12), cu_q_lens, kv_lens]
    dynamic = tuple((i, 0) for i in range(5))
    planned = plan(trt, "faser::compact_rows", inputs, dynamic=dynamic, max_seq_len=512)
    assert planned.output_shapes == [(12, 24), (12,), (12,), (4,), (3,)]
    assert check_code(planned.launches[0]) == 10
    found = outputs_of(planned)
    run(emulated("compact_rows"), planned.launches[0], inputs, found)
    arrays = [t.float().numpy() if t.is_floating_point() else t.numpy() for t in inputs]
    for tensor, wanted in zip(found, compact_rows_reference(*arrays, 512), strict=True):
        np.testing.assert_array_equal(tensor.float().numpy(), wanted)


def test_prune_rows(trt):
    scores, batch = boundary_batch(5, [3, 0, 6], [4])
    cu_drafts = np.cumsum([0, 3, 0, 6]).astype(np.int32)
    arrays = (scores, batch.places, batch.rule.before, cu_drafts, batch.starts, batch.rule.weights())
    positions = torch.zeros(batch.num_hidden + 5, dtype=torch.int32)  # with dummies, which stay
    inputs = [*map(torch.from_numpy, arrays), positions]
    planned = plan(trt, "faser::prune_rows", inputs, dynamic=((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (6, 0)))
    assert planned.output_shapes == [(3,), (batch.num_hidden + 5,)]
    assert check_code(planned.launches[0]) == 9
    found = outputs_of(planned)
    run(emulated("prune_rows"), planned.launches[0], inputs, found)
    batch.num_hidden += 5
    kept = prune_rows_reference(scores, batch)
    assert found[0].tolist() == kept.tolist()
    listed = kept_rows(batch, kept).tolist()
    assert found[1].tolist() == listed + [-1] * (batch.num_hidden - len(listed))


def test_a_launch_follows_the_shape(trt):
    """Symbols are worked out per execution: more rows, a larger grid and other scalars from the same code."""
    few, many = (
        plan(trt, "faser::compact_rows", [*batch, torch.zeros(3, dtype=torch.int32), *rest], max_seq_len=9).launches[0]
        for batch, rest in ((b[:2], b[2:]) for b in (batch_of([4, 2], [0, 0], 24), batch_of([40, 2], [0, 0], 24)))
    )
    assert few.code == many.code
    assert (few.scalars[0], many.scalars[0]) == (6, 42)


class TestMistakes:
    """The engine build refuses mistakes in a network or a descriptor."""

    def test_wrong_types_are_named(self, trt):
        inputs = Paged().append_inputs()
        for index, name, dtype in ((1, "cos", torch.bfloat16), (3, "positions", torch.float32)):
            wrong = [*inputs[:index], inputs[index].to(dtype), *inputs[index + 1 :]]
            with pytest.raises(InvalidArgumentError, match=f"{name} of faser::append_kv has type"):
                plan(trt, "faser::append_kv", wrong)
        with pytest.raises(InvalidArgumentError, match=r"qkv has type .*FLOAT"):
            plan(trt, "faser::append_kv", [inputs[0].float(), *inputs[1:]])

    def test_wrong_ranks_are_named(self, trt):
        inputs = Paged().attention_inputs()
        with pytest.raises(InvalidArgumentError, match="kv_lens of faser::verify_attention has 2 dimensions"):
            plan(trt, "faser::verify_attention", [*inputs[:5], inputs[5][None]], split_tokens=0)

    def test_a_chunk_that_cuts_a_tile_is_refused(self, trt):
        with pytest.raises(InvalidArgumentError, match="split_tokens of faser::verify_attention is 96"):
            plan(trt, "faser::verify_attention", Paged().attention_inputs(), split_tokens=96)

    def test_dynamic_heads_are_refused(self, trt):
        with pytest.raises(InvalidArgumentError, match="head_dim is dynamic"):
            plan(trt, "faser::append_kv", Paged().append_inputs(), dynamic=((7, 3),))

    def test_head_sizes_without_a_kernel_are_refused(self, trt):
        inputs = Paged().attention_inputs()
        narrow = [inputs[0][..., :48], inputs[1][..., :48], inputs[2][..., :48], *inputs[3:]]
        with pytest.raises(InvalidArgumentError, match="head_dim is 48; faser::verify_attention has kernels for"):
            plan(trt, "faser::verify_attention", narrow, split_tokens=0)

    def test_too_many_candidates_are_refused(self, trt):
        inputs = early_exit_inputs(1, num_candidates=33)
        with pytest.raises(InvalidArgumentError, match="num_candidates is 33; it must be 1 to 32"):
            plan(trt, "faser::early_exit", inputs, rms_norm_eps=EPS)

    def test_missing_attributes_are_refused(self, trt):
        with pytest.raises(ValueError, match="Unexpected schema"):
            plan(trt, "faser::early_exit", early_exit_inputs(1))
        with pytest.raises(ValueError, match="Unexpected type"):
            plan(trt, "faser::early_exit", early_exit_inputs(1), rms_norm_eps=1)

    def test_a_descriptor_that_does_not_fit_is_refused(self, trt):
        """The stand-in runs TensorRT's own checks: they see a parameter that is not the plugin's."""

        def describe(x):
            return x.like()

        def implement(y, outputs, tactic):
            raise AssertionError("called")

        with pytest.raises(ValueError, match="does not match the expected input arg schema"):
            register_plugin(trt.plugin, "faser_test::wrong", describe, implement, num_outputs=1)

    def test_one_target_per_process(self, trt):
        assert plugins.register(trt, "sm_90", "ptx") == plugins.PLUGIN_IDS
        with pytest.raises(ConfigError, match=r"registered for sm_90 \(ptx\) and cannot be for sm_90 \(cubin\)"):
            plugins.register(trt, "sm_90")
        with pytest.raises(ConfigError, match="kind is 'fatbin'; it must be 'ptx' or 'cubin'"):
            plugins.register(trt, "sm_90", "fatbin")

    def test_a_module_without_plugins_is_refused(self):
        rtx = pytest.importorskip("tensorrt_rtx")
        with pytest.raises(ConfigError, match=r"tensorrt_rtx .* has no ahead-of-time plugins; install tensorrt 10\.13"):
            plugins.register(rtx, "sm_90")


def test_cubins_can_be_embedded(bindings, trt):
    """For one architecture alone; as machine code, that TensorRT's Python takes the same way."""
    module = stand_in.load(bindings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", module)
        patch.setitem(sys.modules, "tensorrt.plugin", module.plugin)
        plugins.register(module, "sm_80")
    hidden, positions, cu_q_lens, kv_lens = batch_of([4, 2], [0, 0], 24)
    inputs = [hidden, positions, listed_rows(cu_q_lens, [1, 1], 2), cu_q_lens, kv_lens]
    planned = plan(module, "faser::compact_rows", inputs, max_seq_len=512)
    assert planned.launches[0].code.startswith(b"\x7fELF")
