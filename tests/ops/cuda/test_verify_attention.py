"""verify_attention: the reference against a dense computation, the kernels (emulated, and on a GPU) against it."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import verify_attention as op
from faser_trtllm.ops.cuda.compiler import source_dir
from lab.reference.cuda.verify_attention import verify_attention_reference
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.paged_cases import NEVER, PagedCase, assert_close, garbage, paged_case, run
from tests.support.effort import examples, pick

# (rows, kv_len) per request: idle ones, a first chunk, one row far behind, kv_len 0.
BATCHES = [
    [(1, 1)],
    [(3, 40), (1, 130), (0, 7), (5, 5)],
    [(0, 0), (2, 65), (0, 90), (17, 64), (1, 63)],
    [(70, 70), (1, 200), (0, 0)],
]


# Windows, and whether rows see those after them: as decoders, EAGLE-3 heads and block drafters have them.
MASKS = [(0, True), (0, True), (1, True), (33, True), (1000, True), (op.BUT_FIRST, True), (op.BUT_FIRST, True)]
MASKS += [(0, False), (0, False), (1, False), (9, False), (33, False)]


def dense(case: PagedCase, window: int = 0, is_causal: bool = True, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Every row alone, in fp64, over positions looked up one by one."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    tokens_per_block, group = case.k_cache.shape[2], case.q.shape[1] // case.k_cache.shape[1]
    for b, kv_len in enumerate(case.kv_lens.tolist()):
        first, end = case.cu_q_lens[b].item(), case.cu_q_lens[b + 1].item()
        for row in range(first, end):
            last = kv_len - (end - row)
            first_place = max(0, last - window + 1) if window > 0 else 0
            if window == op.BUT_FIRST:
                first_place = min(last, 1)
            places = range(first_place, last + 1 if is_causal else kv_len)
            for head in range(case.q.shape[1]):
                at = [
                    (int(case.block_table[b, p // tokens_per_block]), head // group, p % tokens_per_block)
                    for p in places
                ]
                if not at:
                    continue
                keys = torch.stack([case.k_cache[index].double() for index in at])
                values = torch.stack([case.v_cache[index].double() for index in at])
                scores = keys @ case.q[row, head].double() / math.sqrt(case.q.shape[2])
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[row, head] = scores.softmax(0)[: len(at)] @ values
    return out


@st.composite
def batches(draw) -> list[tuple[int, int]]:
    requests = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 150)), min_size=1, max_size=5))
    return [(rows, rows + past) for rows, past in requests]


def split_batch(batch: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [rows for rows, _ in batch], [kv_len for _, kv_len in batch]


@settings(max_examples=examples(15))
@given(batches(), st.integers(0, 2**31), st.sampled_from([1, 7, 16]), st.sampled_from(MASKS), st.booleans())
def test_the_reference_is_dense_attention(batch, seed, tokens_per_block, mask, has_sinks):
    generator = torch.Generator().manual_seed(seed)
    case = paged_case(
        generator,
        *split_batch(batch),
        head_dim=4,
        tokens_per_block=tokens_per_block,
        dtype="fp32",
        num_rows_of_nobody=2,
    )
    window, is_causal = mask
    sinks = sinks_of(case, seed) if has_sinks else None
    found = verify_attention_reference(*case.arguments(), window=window, is_causal=is_causal, sinks=sinks)
    torch.testing.assert_close(found.double(), dense(case, window, is_causal, sinks), atol=1e-5, rtol=1e-5)


def sinks_of(case: PagedCase, seed: int) -> torch.Tensor:
    """A score per head, some far from all others."""
    sinks = 3 * torch.randn(case.q.shape[1], generator=torch.Generator().manual_seed(seed))
    sinks[seed % len(sinks)] = (-math.inf, -1000.0, 1000.0, 0.0)[seed % 4]
    return sinks


@pytest.mark.parametrize("head_dim", pick((64, 80), op.HEAD_DIMS))  # a compile each
@pytest.mark.parametrize("tile_rows", op.TILE_ROWS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_every_kernel_on_the_cpu(head_dim, tile_rows, kv_dtype):
    generator = torch.Generator().manual_seed(head_dim + tile_rows)
    module = emulated("verify_attention", {"FASER_HEAD_DIM": head_dim}, order=5)
    options = {"k_scale": 0.5, "v_scale": 3.0} if kv_dtype == "e4m3" else {}
    for batch in BATCHES[:3]:
        case = paged_case(
            generator, *split_batch(batch), head_dim=head_dim, kv_dtype=kv_dtype, num_rows_of_nobody=1, num_heads=6
        )
        wanted = verify_attention_reference(*case.arguments(), **options)
        for split_tokens in (NEVER, 64):
            assert_close(run(module, case, tile_rows, split_tokens, **options), wanted, "bf16", 3.0)


@settings(max_examples=examples(25))
@given(
    batch=batches(),
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (16, 2), (20, 1)]),
    tokens_per_block=st.sampled_from([1, 7, 16, 64, 512]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    fp8=st.booleans(),
    tile_rows=st.sampled_from(op.TILE_ROWS),
    split_tokens=st.sampled_from([NEVER, 64, 64, 128]),
    more_slots=st.sampled_from([None, None, 0, 1, 7]),
    in_place=st.booleans(),
    num_sms=st.sampled_from([1, 50]),
    mask=st.sampled_from(MASKS),
    order=st.integers(0, 9),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    has_sinks=st.booleans(),
)
def test_any_batch_on_the_cpu(
    batch,
    seed,
    heads,
    tokens_per_block,
    dtype,
    fp8,
    tile_rows,
    split_tokens,
    more_slots,
    in_place,
    num_sms,
    mask,
    order,
    spread,
    has_sinks,
):
    case = paged_case(
        torch.Generator().manual_seed(seed),
        *split_batch(batch),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        tokens_per_block=tokens_per_block,
        dtype=dtype,
        kv_dtype="e4m3" if fp8 else dtype,
        num_rows_of_nobody=seed % 4,
        spread=spread,
    )
    options = dict(zip(("window", "is_causal"), mask, strict=True))
    if has_sinks and dtype == "bf16":
        options["sinks"] = sinks_of(case, seed)
    wanted = verify_attention_reference(*case.arguments(), **options)
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64}, order)
    slots = {} if more_slots is None else {"max_slots": case.q.shape[0] + more_slots}
    found = run(module, case, tile_rows, split_tokens, num_sms=num_sms, in_place=in_place, **options, **slots)
    assert_close(found, wanted, dtype, 2.0)


@pytest.mark.parametrize("tile_rows", op.TILE_ROWS)
@pytest.mark.parametrize("split_tokens", [NEVER, 64])
def test_blocks_that_do_not_exist_read_as_zeros(tile_rows, split_tokens):
    case = paged_case(torch.Generator().manual_seed(3), [4, 2, 1], [100, 50, 30])
    for index, block in (((0, 1), -1), ((0, 3), case.k_cache.shape[0]), ((1, 0), 2**31 - 1), ((1, 1), -(2**31))):
        case.block_table[index] = block
    # The last request's rows see all of its table, which ends long before its kv_len.
    case.kv_lens[2] = 10_000
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=2.0)
    wanted = verify_attention_reference(*case.arguments())
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    found = run(module, case, tile_rows, split_tokens)
    assert_close(found, wanted, "bf16", 2.0)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**31), st.sampled_from(op.TILE_ROWS), st.sampled_from([0, 8, 11, 32]), st.booleans())
def test_arbitrary_data_stays_within_the_outputs(seed, tile_rows, max_slots, in_place):
    """Whatever a builder feeds, memory around the outputs does not change, and the kernel ends."""
    generator = torch.Generator().manual_seed(seed)
    case = paged_case(generator, [3, 0, 5], [20, 30, 40], tokens_per_block=8)
    for name in ("block_table", "cu_q_lens", "kv_lens"):
        setattr(case, name, garbage(generator, getattr(case, name)))
    shape = op.shape_of(*case.arguments())
    around = torch.full((case.q.numel() + 512,), 7.0, dtype=case.q.dtype)
    out = around[256:-256].view(case.q.shape)
    scratch = torch.full((op.workspace_bytes(shape, max_slots) // 4 + 64,), 7.0)
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    options = {"tile_rows": tile_rows, "split_tokens": 64, "max_slots": max_slots, "workspace": scratch[32:-32]}
    options["in_place"] = in_place
    op.launch(module, *case.arguments(), out, **options)
    for edge in (around[:256], around[-256:], scratch[:32], scratch[-32:]):
        assert (edge == 7.0).all()


BREAKAGES = {
    "a copy is not waited for": ("cp_async_wait<kNumSlots - 2>", "cp_async_wait<kNumSlots - 1>"),
    "a slot is taken too early": ("fetch(half + kNumSlots - 1);", "fetch(half + kNumSlots);"),
    "a row sees one position too few": ("position > last)", "position >= last)"),
    "rows see those after them": ("is_causal() const { return window >= -1;", "is_causal() const { return false;"),
    "stale positions are read": ("first + token < kv_end;", "first + token < kv_end + 15;"),
    "a chunk is done twice": ("mine.item / num_tiles : 0", "mine.item / num_tiles / 2 : 0"),
    "a slot is another row's": ("(row - mine.first_row) *", "(mine.num_rows - 1) *"),
    "a merge forgets what was before": ("both.sum = of(a.sum, b.sum)", "both.sum = b.sum"),
    "sinks are another head's": ("args.sinks[head]", "args.sinks[0]"),
    "sinks are relative to the largest score": ("exp2_approx(args.sinks[head] * kLog2E - whole.top)", "1.0f"),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", pick(["a slot is taken too early", "stale positions are read"], BREAKAGES))
def test_broken_kernels_are_found(breakage, tmp_path):
    """The emulator is no good if it computes the right thing from a wrong kernel. Without a barrier: test_barriers."""
    sources = tmp_path / "cuda"
    shutil.copytree(source_dir(), sources)
    kernel = sources / "verify_attention.cu"
    right, wrong = BREAKAGES[breakage]
    files = [path for path in (kernel, *sources.glob("attention/*.cuh")) if right in path.read_text()]
    assert files
    for path in files:
        path.write_text(path.read_text().replace(right, wrong))
    some_kernels = r"^  FASER_VERIFY_ATTENTION_OF_TYPES\((fp16|\w+_e4m3),.*\n"
    broken, num_left_out = re.subn(some_kernels, "\n", kernel.read_text(), flags=re.MULTILINE)
    assert num_left_out == 3, "what is not run here need not be compiled"
    kernel.write_text(broken)
    case = paged_case(torch.Generator().manual_seed(4), *split_batch(BATCHES[1]))
    long = paged_case(torch.Generator().manual_seed(5), [3, 2, 0, 5], [40, 700, 7, 5])
    sinks = torch.tensor([0.5, 3.0, -1.0, 2.0])
    modules = [emulated("verify_attention", {"FASER_HEAD_DIM": 64}, order, sources) for order in (0, 1, 5)]
    found, wanted = [], []
    for module in modules:
        found += [run(module, case, 64), run(module, long, 64, 64, num_sms=1), run(module, long, 16, 64, num_sms=1)]
        wanted += [verify_attention_reference(*each.arguments()) for each in (case, long, long)]
        found.append(run(module, case, 64, sinks=sinks))
        wanted.append(verify_attention_reference(*case.arguments(), sinks=sinks))
    with pytest.raises(AssertionError, match="not close"):
        assert_close(torch.cat(found), torch.cat(wanted), "bf16", 2.0)


@pytest.mark.parametrize("split_tokens", [NEVER, 64])
def test_a_row_does_not_depend_on_its_neighbors(split_tokens):
    """Bit for bit: a request alone and among others, whose contexts are longer and shorter, as long as the tile is the
    same."""
    generator = torch.Generator().manual_seed(9)
    case = paged_case(generator, [2, 5, 1], [60, 170, 333])
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    together = run(module, case, 16, split_tokens)
    alone = PagedCase(
        case.q[2:7].clone(),
        case.k_cache,
        case.v_cache,
        case.block_table[1:2],
        torch.tensor([0, 5], dtype=torch.int32),
        case.kv_lens[1:2],
    )
    assert torch.equal(run(module, alone, 16, split_tokens), together[2:7])


class Blocks:
    """Launches, and remembers kernels and grids."""

    def __init__(self, module) -> None:
        self.module, self.grids = module, {}

    def launch(self, kernel, grid, *rest) -> None:
        self.grids[kernel] = grid
        self.module.launch(kernel, grid, *rest)


def test_a_long_context_among_short_ones_is_split():
    """The chunks of one request are the items of many blocks; the short ones have no chunks."""
    case = paged_case(torch.Generator().manual_seed(2), [1, 3, 1, 1], [40, 1200, 33, 64], num_rows_of_nobody=2)
    shape = op.shape_of(*case.arguments())
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64})
    wanted, whole = run(module, case, 16, 64), run(module, case, 16)
    assert not torch.equal(whole[1:4], wanted[1:4]), "sums of chunks have other bits than one long sum"
    assert torch.equal(whole[[0, 4, 5]], wanted[[0, 4, 5]])
    tiles = op.num_tiles(shape, 16)
    for in_place in (False, True):
        launched = Blocks(module)
        assert torch.equal(run(launched, case, 16, 64, num_sms=4, in_place=in_place), wanted)
        combine = {} if in_place else {"verify_attention_combine_bf16": (8, 1, 1)}
        assert launched.grids == {"verify_attention_bf16_h64_m16": (tiles + 6, 2, 1)} | combine


@settings(max_examples=examples(25))
@given(
    data=st.data(), seed=st.integers(0, 2**31), tile_rows=st.sampled_from(op.TILE_ROWS), mask=st.sampled_from(MASKS[:7])
)
def test_a_row_has_the_same_bits_in_any_pass(data, seed, tile_rows, mask):
    """A prompt in a pass of its own, and cut into any parts in batches with other requests, with few and many slots."""
    generator, window = torch.Generator().manual_seed(seed), mask[0]
    length = data.draw(st.integers(1, 400))
    heads = dict(zip(("num_heads", "num_kv_heads"), data.draw(st.sampled_from([(4, 2), (3, 1), (20, 1)])), strict=True))
    case = paged_case(
        generator, [length, 0, 0], [length, 300, 90], spread=data.draw(st.sampled_from([1.0, 30.0])), **heads
    )
    module = emulated("verify_attention", {"FASER_HEAD_DIM": 64}, data.draw(st.integers(0, 2)))
    others = paged_case(generator, [40], [40], **heads).q
    wanted = run(module, case, tile_rows, 64, window=window)[:length]
    begin = data.draw(st.integers(0, length - 1))
    while begin < length:
        end = min(length, begin + data.draw(st.sampled_from([1, 2, 5, 64, 300])))
        first, last = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
        part = dataclasses.replace(
            case,
            q=torch.cat([others[:first], case.q[begin:end], others[20 : 20 + last]]),
            block_table=case.block_table[[1, 0, 2]],
            cu_q_lens=torch.tensor([0, first, first + end - begin, first + end - begin + last], dtype=torch.int32),
            kv_lens=torch.tensor([300, end, 90], dtype=torch.int32),
        )
        more = data.draw(st.sampled_from([None, 0, 1, 30]))
        slots = {} if more is None else {"max_slots": part.q.shape[0] + more}
        found = run(module, part, tile_rows, 64, window=window, in_place=data.draw(st.booleans()), **slots)
        assert torch.equal(found[first : first + end - begin], wanted[begin:end])
        begin = end


def test_wrong_arguments_are_named():
    case = paged_case(torch.Generator().manual_seed(0), [2], [20])
    in_fp16 = {name: getattr(case, name).half() for name in ("q", "k_cache", "v_cache")}
    wrong = [
        ("head_dim is 32", {"q": case.q[..., :32]}, {}),
        ("num_heads is 3", {"q": case.q[:, :3]}, {}),
        ("q has type fp32", {"q": case.q.float(), "k_cache": case.k_cache.float()}, {}),
        ("k_cache has type fp16", {"k_cache": case.k_cache.half()}, {}),
        ("v_cache has type fp16", {"v_cache": case.v_cache.half()}, {}),
        ("v_cache has shape", {"v_cache": case.v_cache[1:]}, {}),
        ("k_cache is not contiguous", {"k_cache": case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)}, {}),
        ("cu_q_lens has type int64", {"cu_q_lens": case.cu_q_lens.long()}, {}),
        ("block_table has shape", {"block_table": case.block_table.repeat(2, 1)}, {}),
        ("scale is 0", {}, {"scale": 0.0}),
        ("v_scale is nan", {}, {"v_scale": math.nan}),
        ("tile_rows is 32", {}, {"tile_rows": 32}),
        ("split_tokens is 96; it must be a power of two", {}, {"split_tokens": 96}),
        ("split_tokens is 32", {}, {"split_tokens": 32}),
        ("max_slots is 1000000; it must be 0 or 2 to 63552", {}, {"max_slots": 1_000_000}),
        ("max_slots is 1; it must be 0 or 2 to", {}, {"max_slots": 1}),
        ("window is -2", {}, {"window": -2}),
        ("window is -1; .* where rows see those after", {}, {"window": -1, "is_causal": False}),
        ("workspace holds 0 bytes; 2 slots need", {}, {"max_slots": 2}),
        ("sinks has shape", {}, {"sinks": torch.zeros(3)}),
        ("sinks has type bf16; it must be fp32", {}, {"sinks": torch.zeros(4).bfloat16()}),
        ("q is fp16 with a head_dim of 64; the kernels with sinks need bf16", in_fp16, {"sinks": torch.zeros(4)}),
    ]
    for message, tensors, options in wrong:
        changed = PagedCase(**(vars(case) | tensors))
        with pytest.raises(InvalidArgumentError, match=message):
            op.launch(None, *changed.arguments(), torch.empty_like(changed.q), **options)
    many = paged_case(torch.Generator().manual_seed(0), [2], [20], num_heads=2)
    options = {"in_place": True, "max_slots": 100_000, "workspace": torch.empty(100_000 * 2 * 66)}
    with pytest.raises(InvalidArgumentError, match="in_place is set, but 100000 slots may need more than"):
        op.launch(None, *many.arguments(), torch.empty_like(many.q), **options)
    storage = torch.zeros(case.q.numel() + 1, dtype=case.q.dtype)
    with pytest.raises(InvalidArgumentError, match="not a multiple of 16"):
        op.launch(None, storage[1:].view(case.q.shape), case.arguments()[1], torch.empty_like(case.q))


@pytest.fixture
def gpu_module(on_gpu):
    return on_gpu("verify_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", op.HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tile_rows", op.TILE_ROWS)
def test_on_a_gpu(gpu_module, head_dim, dtype, fp8, tile_rows):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    batches = [*BATCHES, [(5, 900), (1, 2000), (0, 3), (8, 8)], [(300, 700), (33, 33), (1, 5000)]]
    for batch in batches:
        case = paged_case(
            generator,
            *split_batch(batch),
            num_heads=8,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype="e4m3" if fp8 else dtype,
            num_rows_of_nobody=3,
        ).to("cuda")
        for window, is_causal in ((0, True), (50, True), (0, False), (50, False)):
            mask = {"window": window, "is_causal": is_causal}
            wanted = verify_attention_reference(*case.arguments(), **mask)
            for split_tokens in (NEVER, 64, 512):
                found = run(gpu_module, case, tile_rows, split_tokens, **mask)
                torch.cuda.synchronize()
                assert_close(found, wanted, dtype, 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tile_rows", op.TILE_ROWS)
def test_sinks_on_a_gpu(gpu_module, fp8, tile_rows):
    for seed, batch in enumerate([*BATCHES, [(5, 900), (1, 2000), (0, 3), (8, 8)]]):
        generator, kv_dtype = torch.Generator().manual_seed(seed), "e4m3" if fp8 else "bf16"
        case = paged_case(generator, *split_batch(batch), num_heads=8, kv_dtype=kv_dtype).to("cuda")
        for window in (0, 50):
            options = {"window": window, "sinks": sinks_of(case, seed).cuda()}
            wanted = verify_attention_reference(*case.arguments(), **options)
            for split_tokens in (NEVER, 64, 512):
                found = run(gpu_module, case, tile_rows, split_tokens, **options)
                torch.cuda.synchronize()
                assert_close(found, wanted, "bf16", 2.0)


@pytest.mark.gpu
def test_a_long_context_on_a_gpu(gpu_module):
    """1 row and 16 rows over 100 000 positions; a constant V shows a lost or doubled position at once."""
    generator = torch.Generator().manual_seed(1)
    for num_rows in (1, 16):
        case = paged_case(generator, [num_rows], [100_000], num_heads=8, head_dim=128).to("cuda")
        case.v_cache.fill_(1.0)
        for split_tokens in (NEVER, 512):
            found = run(gpu_module, case, 16, split_tokens)
            torch.cuda.synchronize()
            assert_close(found, torch.ones_like(found), "bf16")


@pytest.mark.gpu
def test_arbitrary_data_on_a_gpu(gpu_module):
    """Ends, and without an illegal access."""
    generator = torch.Generator().manual_seed(2)
    for seed in range(50):
        case = paged_case(generator, [3, 0, 5], [20, 30, 40], tokens_per_block=8, head_dim=op.HEAD_DIMS[seed % 5])
        for name in ("block_table", "cu_q_lens", "kv_lens"):
            setattr(case, name, garbage(generator, getattr(case, name)))
        run(gpu_module, case.to("cuda"), op.TILE_ROWS[seed % 2], (NEVER, 64)[seed % 3 % 2])
        torch.cuda.synchronize()
