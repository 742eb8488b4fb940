"""append_kv: the reference against Hugging Face's rope, the kernels (emulated, and on a GPU) against the reference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import append_kv as op
from lab.reference.cuda.append_kv import append_kv_reference, normed_qkv
from tests.ops.cuda.append_cases import (
    MAX_SEQ_LEN,
    AppendCase,
    append_case,
    assert_near,
    assert_same,
    branch_case,
    normed_case,
)
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.paged_cases import garbage
from tests.support.effort import examples


@st.composite
def batches(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 80)), min_size=1, max_size=5))
    return [rows for rows, _ in requests], [rows + past for rows, past in requests]


def test_the_reference_is_hugging_face_s_rope():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = append_case(torch.Generator().manual_seed(0), [3, 0, 2], [10, 4, 40])
    append_kv_reference(*case.arguments())
    q, k, v = case.qkv.float().view(5, 8, 64).split([4, 2, 2], 1)
    cos, sin = (table[case.positions.long()].repeat(1, 2)[None] for table in (case.cos, case.sin))
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    torch.testing.assert_close(case.q_rotated, q.to(torch.bfloat16))
    written = torch.zeros(case.k_cache.shape[::2], dtype=torch.bool)
    for row, (b, position) in enumerate([(0, 7), (0, 8), (0, 9), (2, 38), (2, 39)]):
        block, offset = case.block_table[b, position // 16], position % 16
        written[block, offset] = True
        torch.testing.assert_close(case.k_cache[block, :, offset], k[row].to(torch.bfloat16))
        torch.testing.assert_close(case.v_cache[block, :, offset], v[row].to(torch.bfloat16))
    for cache in (case.k_cache, case.v_cache):
        assert (cache.transpose(1, 2)[~written] == 1).all()


@settings(max_examples=examples(25))
@given(
    batch=batches(),
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (32, 8)]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    tokens_per_block=st.sampled_from([1, 7, 16, 96]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    fp8=st.booleans(),
    dummies=st.integers(0, 3),
)
def test_any_batch_on_the_cpu(batch, seed, heads, head_dim, tokens_per_block, dtype, fp8, dummies):
    generator = torch.Generator().manual_seed(seed)
    wanted = append_case(
        generator,
        *batch,
        heads=heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        dtype=dtype,
        fp8=fp8,
        dummies=dummies,
    )
    found = wanted.copy()
    scales = {"k_scale": 0.25, "v_scale": 0.01} if fp8 else {}
    append_kv_reference(*wanted.arguments(), **scales)
    op.launch(emulated("append_kv"), *found.arguments(), **scales)
    assert_same(found, wanted)


@settings(max_examples=examples(25))
@given(
    batch=batches(),
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    hidden_size=st.sampled_from([8, 64, 1032]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    has_bias=st.booleans(),
    fp8=st.booleans(),
    has_norms=st.booleans(),
)
def test_rows_that_were_not_normalized_on_the_cpu(
    batch, seed, heads, head_dim, hidden_size, dtype, has_bias, fp8, has_norms
):
    generator = torch.Generator().manual_seed(seed)
    wanted = append_case(generator, *batch, heads=heads, head_dim=head_dim, dtype=dtype, fp8=fp8)
    norm = normed_case(wanted, hidden_size, generator, has_bias=has_bias, has_norms=has_norms)
    found = wanted.copy()
    append_kv_reference(*wanted.arguments(), norm=norm)
    op.launch(emulated("append_kv"), *found.arguments(), norm=norm)
    assert_near(found, wanted)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_before_a_branch_are_in_its_block_too(seed, fp8):
    case, norm, first_branch = branch_case(seed, fp8=fp8)
    found, chain = case.copy(), case.copy()
    append_kv_reference(*case.arguments(), norm=norm, first_branch=first_branch)
    op.launch(emulated("append_kv"), *found.arguments(), norm=norm, first_branch=first_branch)
    op.launch(emulated("append_kv"), *chain.arguments(), norm=norm)
    assert_near(found, case)
    before = {3: [14], 4: [16], 5: [16, 17], 6: [38, 39]}
    parents = {3: 0, 4: 0, 5: 0, 6: 1}
    for name in ("k_cache", "v_cache"):
        new, old = getattr(found, name).view(torch.uint8), getattr(chain, name).view(torch.uint8).clone()
        for branch, positions in before.items():
            for position in positions:
                own, other = (case.block_table[b, position // 16] for b in (branch, parents[branch]))
                assert own != other
                assert (getattr(chain, name)[own, :, position % 16].float() == 1).all()
                old[own, :, position % 16] = old[other, :, position % 16]
        assert torch.equal(new, old), "and nothing else"


def test_branches_take_the_kernels_with_a_norm():
    case, norm, first_branch = branch_case(0)
    with pytest.raises(InvalidArgumentError, match="first_branch is given without a norm"):
        op.launch(None, *case.arguments(), first_branch=first_branch)
    with pytest.raises(InvalidArgumentError, match=r"first_branch has shape \[7\]; it must be \[8\]"):
        op.launch(None, *case.arguments(), norm=norm, first_branch=first_branch[:-1])


def test_the_reference_norms_as_torch_does():
    generator = torch.Generator().manual_seed(5)
    norm = normed_case(append_case(generator, [3], [3]), 48, generator, has_bias=True, has_norms=True)
    weight = torch.randn((512, 48), generator=generator, dtype=torch.float64)
    rms_norm = torch.nn.functional.rms_norm
    normed = rms_norm(norm.hidden.double(), (48,), None, norm.eps) @ weight.t() + norm.bias.double()
    q, k, v = normed.view(3, 8, 64).split([4, 2, 2], 1)
    q, k = (rms_norm(x, (64,), w.double(), norm.eps) for x, w in ((q, norm.q_norm), (k, norm.k_norm)))
    found = normed_qkv(norm.hidden.double() @ weight.t(), 4, 2, norm)
    torch.testing.assert_close(found, torch.cat((q, k, v), 1).view(3, 512))


def test_a_row_that_was_not_normalized_depends_on_no_other_row():
    generator = torch.Generator().manual_seed(3)
    whole = append_case(generator, [4], [30])
    norm = normed_case(whole, 264, generator, has_bias=True, has_norms=True)
    alone = whole.copy()
    op.launch(emulated("append_kv"), *whole.arguments(), norm=norm)
    alone.qkv, alone.positions, alone.q_rotated = alone.qkv[2:3], alone.positions[2:3], alone.q_rotated[2:3]
    alone.cu_q_lens = torch.tensor([0, 1], dtype=torch.int32)
    op.launch(
        emulated("append_kv", order=2), *alone.arguments(), norm=dataclasses.replace(norm, hidden=norm.hidden[2:3])
    )
    assert torch.equal(alone.q_rotated, whole.q_rotated[2:3])
    block, offset = whole.block_table[0, 28 // 16], 28 % 16
    assert torch.equal(alone.k_cache[block, :, offset], whole.k_cache[block, :, offset])
    assert torch.equal(alone.v_cache[block, :, offset], whole.v_cache[block, :, offset])


def test_what_is_out_of_range_is_not_written():
    case = append_case(torch.Generator().manual_seed(1), [6, 3], [20, 9])
    before = case.k_cache.clone(), case.v_cache.clone()
    case.positions[:6] = torch.tensor([-1, 20, MAX_SEQ_LEN, 2**31 - 1, -(2**31), 50])
    case.block_table[1] = torch.tensor([-1, 2**31 - 1, case.k_cache.shape[0]])
    case.positions[6:] = torch.tensor([0, 8, 8])
    reference = case.copy()
    append_kv_reference(*reference.arguments())
    op.launch(emulated("append_kv"), *case.arguments())
    assert torch.equal(case.k_cache, before[0])
    assert torch.equal(case.v_cache, before[1])
    assert_same(case, reference)
    assert case.q_rotated.isfinite().all()


@settings(max_examples=examples(60))
@given(st.integers(0, 2**31))
def test_arbitrary_data_stays_within_the_caches(seed):
    """Whatever a builder feeds, the memory around the tensors does not change."""
    generator = torch.Generator().manual_seed(seed)
    case = append_case(generator, [3, 0, 2], [10, 20, 15], tokens_per_block=4, head_dim=64)
    for name in ("positions", "cu_q_lens", "block_table", "kv_lens"):
        setattr(case, name, garbage(generator, getattr(case, name)))
    edges = []
    for name in ("q_rotated", "k_cache", "v_cache"):
        tensor = getattr(case, name)
        around = torch.full((tensor.numel() + 4096,), 7.0, dtype=tensor.dtype)
        around[2048:-2048] = tensor.flatten()
        setattr(case, name, around[2048:-2048].view(tensor.shape))
        edges += [around[:2048], around[-2048:]]
    wanted = case.copy()
    op.launch(emulated("append_kv"), *case.arguments())
    assert all((edge == 7.0).all() for edge in edges)
    # Two rows that write one place have no order; where none do, the reference says what is written.
    if not writes_twice(case):
        append_kv_reference(*wanted.arguments())
        assert_same(case, wanted)


def writes_twice(case):
    """Return whether requests overlap, or two rows have the same block and offset."""
    if (case.cu_q_lens.long().diff() < 0).any():
        return True
    num_blocks, _, tokens_per_block, _ = case.k_cache.shape
    num_slots = case.block_table.shape[1]
    places = Counter()
    for b, (first, end) in enumerate(itertools.pairwise(case.cu_q_lens.tolist())):
        for position in case.positions[max(0, first) : max(0, end)].tolist():
            slot, offset = divmod(position, tokens_per_block)
            if 0 <= slot < num_slots:
                places[int(case.block_table[b, slot]), offset] += 1
    return any(times > 1 for (block, _), times in places.items() if 0 <= block < num_blocks)


def test_fp8_saturates():
    case = append_case(torch.Generator().manual_seed(2), [1], [1], fp8=True)
    case.qkv[:] = 1e4
    op.launch(emulated("append_kv"), *case.arguments(), v_scale=0.5)
    assert (case.v_cache[case.block_table[0, 0], :, 0].float() == 448).all()


def test_wrong_arguments_are_named():
    case = append_case(torch.Generator().manual_seed(0), [2], [20])
    wrong = [
        ("head_dim is 8", {"q_rotated": case.q_rotated[..., :8]}, {}),
        ("qkv has type fp32; it must be bf16", {"qkv": case.qkv.float()}, {}),
        ("qkv has shape", {"qkv": case.qkv[:, :64]}, {}),
        ("cos has type bf16", {"cos": case.cos.bfloat16()}, {}),
        ("sin has shape", {"sin": case.sin[1:]}, {}),
        ("positions has type int64", {"positions": case.positions.long()}, {}),
        ("k_cache has type fp16", {"k_cache": case.k_cache.half()}, {}),
        ("v_cache has shape", {"v_cache": case.v_cache[1:]}, {}),
        ("block_table has shape", {"block_table": case.block_table.repeat(2, 1)}, {}),
        ("max_seq_len 0", {"cos": case.cos[:0], "sin": case.sin[:0]}, {}),
        ("k_scale is 0", {}, {"k_scale": 0.0}),
        ("v_scale is inf", {}, {"v_scale": math.inf}),
    ]
    for message, tensors, options in wrong:
        changed = AppendCase(**(vars(case) | tensors))
        with pytest.raises(InvalidArgumentError, match=message):
            op.launch(None, *changed.arguments(), **options)


def test_wrong_norms_are_named():
    generator = torch.Generator().manual_seed(0)
    case = append_case(generator, [2], [20])
    norm = normed_case(case, 16, generator, has_bias=True, has_norms=True)
    wrong = {
        "hidden has shape": {"hidden": norm.hidden[:1]},
        "hidden has shape .* a multiple of 8": {"hidden": norm.hidden[:, :12]},
        "bias has type fp16": {"bias": norm.bias.half()},
        "q_norm has shape": {"q_norm": norm.q_norm[:8]},
        "k_norm has shape": {"k_norm": norm.k_norm[:8]},
    }
    for message, changes in wrong.items():
        with pytest.raises(InvalidArgumentError, match=message):
            op.launch(None, *case.arguments(), norm=dataclasses.replace(norm, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp8", [False, True])
def test_on_a_gpu(on_gpu, head_dim, dtype, fp8):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    module = on_gpu("append_kv")
    for arbitrary in (False, True):
        for _ in range(5):
            case = append_case(
                generator,
                [7, 0, 30, 1],
                [7, 5, 90, 64],
                heads=(16, 4),
                head_dim=head_dim,
                dtype=dtype,
                fp8=fp8,
                dummies=3,
            )
            if arbitrary:
                case.positions = garbage(generator, case.positions)
                case.block_table = garbage(generator, case.block_table)
            wanted = case.copy()
            append_kv_reference(*wanted.arguments())
            found = case.copy("cuda")
            op.launch(module, *found.arguments())
            torch.cuda.synchronize()
            # Two rows may have one arbitrary position: which is written last is not said.
            if not arbitrary:
                assert_same(found.copy("cpu"), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_branches_on_a_gpu(on_gpu, fp8):
    case, norm, first_branch = branch_case(1, fp8=fp8)
    found = case.copy("cuda")
    moved = {name: getattr(norm, name).cuda() for name in ("hidden", "bias", "q_norm", "k_norm")}
    append_kv_reference(*case.arguments(), norm=norm, first_branch=first_branch)
    module = on_gpu("append_kv")
    op.launch(module, *found.arguments(), norm=dataclasses.replace(norm, **moved), first_branch=first_branch.cuda())
    assert_near(found.copy(), case)
