"""Instructions of a warp and of a block: mma, ldmatrix, shfl, vote, barriers; cp.async and its groups; atomics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.cuda.ptx.interpreter.program import PtxError
from tests.ops.cuda.ptx.snippet import interpret

LANES = np.arange(32)


def fragment(block: np.ndarray) -> np.ndarray:
    """[32, 2]: what each lane holds of an 8 x 8 block, as the PTX ISA draws it: four lanes a row, two entries each."""
    return np.ascontiguousarray(block).reshape(32, 2)


def registers(*blocks: np.ndarray) -> list[np.ndarray]:
    """Fragments of 16-bit entries as 32-bit registers, the first entry in the low half."""
    return [fragment(block).view(np.uint32).ravel() for block in blocks]


def random_matrix(rng, rows: int, columns: int, kind: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((rows, columns)) * 2).to(kind)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_a_product_of_matrices(name):
    """m16n8k16 by its quadrants: A's go down and then right, B's transpose goes along k, C's two halves go down."""
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[name]
    rng = np.random.default_rng(0)
    warps = []
    for _ in range(2):
        a, b = random_matrix(rng, 16, 16, kind), random_matrix(rng, 16, 8, kind)
        c = rng.standard_normal((16, 8)).astype(np.float32)
        bits_a, bits_b = (m.view(torch.int16).numpy().view(np.uint16) for m in (a, b.t().contiguous()))
        fragments_a = registers(bits_a[:8, :8], bits_a[8:, :8], bits_a[:8, 8:], bits_a[8:, 8:])
        fragments_c = [column for half in (c[:8], c[8:]) for column in fragment(half).T]
        warps.append(([*fragments_a, *registers(bits_b[:, :8], bits_b[:, 8:]), *fragments_c], a, b, c))
    inputs = [np.concatenate(both) for both in zip(*[warp[0] for warp in warps], strict=True)]
    text = f"""mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
    {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%a4, %a5}}, {{%a6, %a7, %a8, %a9}};"""
    found = np.stack(interpret(text, inputs, ("f4",) * 4), 1).reshape(2, 32, 4)
    for (_, a, b, c), lanes in zip(warps, found, strict=True):
        product = np.concatenate([lanes[:, :2].reshape(8, 8), lanes[:, 2:].reshape(8, 8)])
        np.testing.assert_allclose(product, a.double().numpy() @ b.double().numpy() + c, rtol=1e-6, atol=1e-6)


FILL = """
shl.b32 %x0, %t, 4; mov.u32 %x1, pool; add.s32 %x1, %x1, %x0;
st.shared.v4.b32 [%x1], {%a0, %a1, %a2, %a3}; bar.sync 0;
"""
POOL = ".shared .align 16 .b8 pool[1024];"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded(count, transposed):
    """Lane 8m + r names row r of matrix m, here in a random order; lanes beyond the last matrix name nothing."""
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    order = rng.permutation(32)
    words = [np.ascontiguousarray(rows.view(np.uint32)[:, i]) for i in range(4)]
    offsets = np.where(8 * count > LANES, order * 16, 12345).astype(np.uint32)
    targets = ", ".join(f"%d{i}" for i in range(count))
    text = (
        FILL
        + f"""mov.u32 %x1, pool; add.s32 %x1, %x1, %a4;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" * transposed}.shared.b16 {{{targets}}}, [%x1];"""
    )
    found = interpret(text, [*words, offsets], ("u4",) * count, POOL)
    for m in range(count):
        matrix = rows[order[8 * m : 8 * m + 8]]
        (wanted,) = registers(matrix.T if transposed else matrix)
        assert found[m].tolist() == wanted.tolist()


def shuffled(mode: str, values: list[int], b: int, width: int) -> list[int]:
    """As CUDA describes __shfl_sync and its kin: in groups of `width` lanes, a lane without a source keeps its own."""
    found = []
    for lane in range(32):
        first, at = lane // width * width, lane % width
        source = {"up": at - b, "down": at + b, "bfly": at ^ b, "idx": b % width}[mode]
        found.append(values[first + source] if 0 <= source < width else values[lane])
    return found


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_values_go_between_lanes(mode, width):
    x = (LANES * LANES + 5).astype(np.uint32)
    for b in (0, 1, 3, width - 1):
        control = (32 - width) << 8 | (0 if mode == "up" else 31)
        text = f"shfl.sync.{mode}.b32 %d0|%p0, %a0, {b}, {control}, -1; selp.u32 %d1, 1, 0, %p0;"
        found, valid = interpret(text, [x], ("u4", "u4"))
        assert found.tolist() == shuffled(mode, x.tolist(), b, width)
        at = LANES % width
        assert (
            valid.tolist()
            == {
                "up": at >= b,
                "down": at + b < width,
                "bfly": at ^ b < width,
                "idx": at >= 0,
            }[mode]
            .astype(int)
            .tolist()
        )


def test_votes():
    x = np.concatenate([LANES % 3 == 0, LANES < 0, LANES >= 0]).astype(np.uint32)
    text = """setp.ne.u32 %p0, %a0, 0; vote.sync.ballot.b32 %d0, %p0, -1; vote.sync.any.pred %p1, %p0, -1;
    vote.sync.all.pred %p2, %p0, -1; selp.u32 %d1, 1, 0, %p1; selp.u32 %d2, 1, 0, %p2;"""
    ballot, some, every = (found.reshape(3, 32) for found in interpret(text, [x], ("u4",) * 3))
    assert ballot[:, 0].tolist() == [sum(1 << i for i in range(0, 32, 3)), 0, 0xFFFFFFFF]
    assert (ballot == ballot[:, :1]).all()
    assert some[:, 5].tolist() == [1, 0, 1]
    assert every[:, 5].tolist() == [0, 0, 1]


@pytest.mark.parametrize("warps_apart", [None, 1, -1])
def test_threads_that_part_meet_again(warps_apart):
    """Loops of different lengths, then a sum over the warp; half of the lanes vote among themselves on the way."""
    x = np.random.default_rng(1).integers(1, 20, 96).astype(np.uint32)
    text = """
    mov.u32 %x0, 0; mov.u32 %x1, 0; and.b32 %x3, %t, 1; setp.eq.u32 %p1, %x3, 0;
    AGAIN: add.u32 %x0, %x0, 1; mad.lo.u32 %x1, %x0, %x0, %x1;
    setp.lt.u32 %p0, %x0, %a0; @%p0 bra AGAIN;
    mov.u32 %d1, 0; @%p1 bra EVEN; bra.uni MEET;
    EVEN: setp.gt.u32 %p2, %a0, 9; vote.sync.ballot.b32 %d1, %p2, 0x55555555;
    MEET: mov.u32 %d0, %x1;
    """
    for offset in (16, 8, 4, 2, 1):
        text += f"shfl.sync.bfly.b32 %x2, %d0, {offset}, 31, -1; add.u32 %d0, %d0, %x2;"
    total, ballot = interpret(text, [x], ("u4", "u4"), warps_apart=warps_apart)
    for warp in range(3):
        mine = x[32 * warp :][:32].tolist()
        wanted = sum(i * i for n in mine for i in range(1, n + 1))
        assert (total[32 * warp :][:32] == wanted).all()
        votes = sum(1 << i for i in range(0, 32, 2) if mine[i] > 9)
        assert ballot[32 * warp :][:32].tolist() == [votes, 0] * 16


@pytest.mark.parametrize("warps_apart", [None, 1, -1])
def test_a_block_waits_and_votes(warps_apart):
    """Each thread reads what the last warp wrote before the barrier; threads that have ended are not waited for."""
    x = np.arange(96, dtype=np.uint32) * 7
    text = """
    shl.b32 %x0, %t, 2; mov.u32 %x1, pool; add.s32 %x2, %x1, %x0; st.shared.u32 [%x2], %a0; bar.sync 0;
    xor.b32 %x3, %x0, 124; add.s32 %x2, %x1, %x3; ld.shared.u32 %d0, [%x2];
    setp.eq.u32 %p0, %a0, 210; bar.red.or.pred %p1, 0, %p0; selp.u32 %d1, 1, 0, %p1;
    bar.red.popc.u32 %d2, 0, %p1; bar.red.and.pred %p2, 0, %p0; @%p2 mov.u32 %d2, 0;
    """
    swapped, some, number = interpret(text, [x], ("u4",) * 3, POOL, warps_apart=warps_apart)
    assert swapped.tolist() == (x.reshape(3, 32)[:, ::-1]).ravel().tolist()
    assert (some == 1).all()
    assert (number == 96).all()


def test_a_missing_barrier_shows_in_an_order_of_warps():
    x = np.arange(64, dtype=np.uint32) + 1
    text = """shl.b32 %x0, %t, 2; mov.u32 %x1, pool; add.s32 %x2, %x1, %x0; st.shared.u32 [%x2], %a0;
    xor.b32 %x3, %x0, 128; add.s32 %x2, %x1, %x3; ld.shared.u32 %d0, [%x2];"""
    wanted = np.roll(x, 32).tolist()
    assert interpret(text, [x], declare=POOL)[0].tolist() == wanted, "all warps together hide it"
    for order in (1, -1):
        assert interpret(text, [x], declare=POOL, warps_apart=order)[0].tolist() != wanted


COPY = """
shl.b32 %x0, %t, 4; mov.u32 %x1, pool; add.s32 %x1, %x1, %x0; ld.param.u64 %y0, [q0]; mul.wide.u32 %y1, %x0, 1;
add.s64 %y0, %y0, %y1;
"""
TWO_GROUPS = """
cp.async.cg.shared.global.L2::128B [%x1], [%y0], 16, %a0; cp.async.commit_group;
cp.async.ca.shared.global [%x1+516], [%y0+516], 4; cp.async.commit_group;
"""
READ = "ld.shared.v4.u32 {%d0, %d1, %d2, %d3}, [%x1]; ld.shared.u32 %d4, [%x1+516];"
LATE = 0xFFFFFFFF  # what is read before it has come


def copied(text: str, early: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The 16 bytes and the word that each lane finds, and what it was to find; the first copy has source sizes of 0, 4
    ... 16 bytes."""
    source = np.random.default_rng(2).integers(1, 1 << 31, 256).astype(np.uint32)
    sizes = (LANES % 5 * 4).astype(np.uint32)
    found = interpret(COPY + text + READ, [sizes], ("u4",) * 5, POOL, [source], copies_early=early)
    whole = source[:128].reshape(32, 4)
    filled = np.where(np.arange(4) * 4 < sizes[:, None], whole, 0)
    return np.stack(found[:4], 1), found[4], filled, source[129::4]


@pytest.mark.parametrize("wait", ["wait_group 0;", "wait_all;"])
@pytest.mark.parametrize("early", [False, True])
def test_copies_arrive_and_are_filled_with_zeros(wait, early):
    first, second, filled, words = copied(TWO_GROUPS + f"cp.async.{wait}", early)
    assert first.tolist() == filled.tolist()
    assert second.tolist() == words.tolist()


def test_a_copy_comes_no_earlier_than_its_group_is_waited_for():
    for wait, arrived in (("", 0), ("cp.async.wait_group 2;", 0), ("cp.async.wait_group 1;", 1)):
        first, second, filled, words = copied(TWO_GROUPS + wait)
        assert first.tolist() == (filled.tolist() if arrived else np.full((32, 4), LATE).tolist())
        assert (second == LATE).all()
        first, second, *_ = copied(TWO_GROUPS + wait, early=True)
        assert first.tolist() == filled.tolist()
        assert second.tolist() == words.tolist(), "or at once"


def test_a_copy_without_a_group_is_waited_for_by_wait_all_only():
    ungrouped = TWO_GROUPS.rpartition("cp.async.commit_group;")[0]
    assert (copied(ungrouped + "cp.async.wait_group 0;")[1] == LATE).all()
    _, second, _, words = copied(ungrouped + "cp.async.wait_all;")
    assert second.tolist() == words.tolist()


def test_each_thread_waits_for_its_own_copies():
    """The upper half commits one more group, so the same number of open groups lets only its copy arrive."""
    text = "setp.lt.u32 %p0, %t, 16; @%p0 bra JOIN; cp.async.commit_group; JOIN: cp.async.wait_group 2;"
    first, _, filled, _ = copied(TWO_GROUPS + text)
    assert (first[:16] == LATE).all()
    assert first[16:].tolist() == filled[16:].tolist()


def test_a_source_without_bytes_is_not_read():
    text = "mov.u64 %y0, 0; cp.async.cg.shared.global [%x1], [%y0], 16, 0; cp.async.wait_all;"
    assert (copied(text + "st.shared.u32 [%x1+516], 0;")[0] == 0).all()


def test_atomics_take_turns():
    x = (np.arange(64) % 3).astype(np.uint32)
    text = """mov.u32 %x1, pool; st.shared.u32 [%x1], 100; bar.sync 0; atom.shared.add.u32 %d0, [%x1], %a0;
    ld.param.u64 %y0, [q0]; red.global.max.s32 [%y0], %a0; atom.global.cas.b32 %d1, [%y0+4], 7, %t; bar.sync 0;
    ld.shared.u32 %d2, [%x1];"""
    counters = np.array([1, 7], np.uint32)
    before, swapped, after = interpret(text, [x], ("u4",) * 3, POOL, [counters])
    assert before.tolist() == (100 + np.cumsum(x) - x).tolist()
    assert swapped.tolist() == [7] + [0] * 63
    assert (after == 100 + x.sum()).all()
    assert counters.tolist() == [2, 0]


def test_state_spaces_and_generic_addresses():
    """One number through shared, local and global memory; a thread's local memory is its own."""
    x = (np.arange(64) * 3 + 250).astype(np.uint32)
    text = """
    shl.b32 %x0, %t, 2; cvt.u64.u32 %y0, %x0; mov.u64 %y1, pool; cvta.shared.u64 %y1, %y1; add.s64 %y1, %y1, %y0;
    st.u32 [%y1], %a0; cvta.to.shared.u64 %y2, %y1; cvt.u32.u64 %x1, %y2; ld.shared.u32 %x2, [%x1];
    mov.u32 %x3, frame; st.local.u32 [%x3+4], %x2; ld.local.u32 %x4, [%x3+4];
    ld.param.u64 %y3, [q0]; cvta.to.global.u64 %y4, %y3; add.s64 %y4, %y4, %y0; st.global.u32 [%y4], %x4;
    add.s64 %y3, %y3, %y0; ld.u32 %d0, [%y3]; ld.global.s8 %x5, [%y4]; mov.u32 %d1, %x5;
    """
    found, low = interpret(text, [x], ("u4", "i4"), POOL + ".local .align 8 .b8 frame[8];", [np.zeros(64, np.uint32)])
    assert found.tolist() == x.tolist()
    assert low.tolist() == x.astype(np.int8).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ld.param.u64 %y0, [q0]; ld.global.u32 %d0, [%y0+1024];", "of thread 0 and the 4 bytes there are not"),
        ("ld.param.u64 %y0, [q0]; ld.global.u32 %d0, [%y0+-4];", "4 bytes there are not in global memory"),
        ("ld.param.u64 %y0, [q0]; ld.global.u32 %d0, [%y0+2];", "of thread 0 is not aligned to 4 bytes"),
        ("ld.param.u64 %y0, [q0]; ld.global.v2.u32 {%d0, %d1}, [%y0+4];", "is not aligned to 8 bytes"),
        ("mov.u32 %x1, pool; st.shared.u32 [%x1+1022], %t;", "is not aligned to 4 bytes"),
        ("mov.u32 %x1, pool; st.shared.u32 [%x1+1024], %t;", "not in shared memory"),
        ("mov.u32 %x1, pool; mad.lo.u32 %x1, %t, 32, %x1; st.shared.u32 [%x1+32], %t;", "of thread 31 and"),
        ("cp.async.cg.shared.global [%x1], [%y0], 8;", "is unknown here"),
        ("cp.async.ca.shared.global [%x1], [%y0], 8, 9;", "a source of 9 bytes for a copy of 8"),
        ("cp.async.cg.shared.global [%x1+8], [%y0], 16;", "is not aligned to 16 bytes"),
        ("cp.async.cg.shared.global [%x1], [%y0+4096], 16;", "not in global memory"),
        ("cp.async.cg.shared.global [%x1+1024], [%y0], 16;", "not in shared memory"),
        ("shfl.sync.bfly.b32 %d0, %t, 1, 31, 0xFFFF;", "a thread that its own member mask leaves out"),
        ("mov.u32 %x2, -1; shr.u32 %x2, %x2, %x9; vote.sync.any.pred %p0, %p1, %x2;", "which it has not written"),
        (
            "setp.lt.u32 %p0, %t, 16; @!%p0 bra STAY; ret; STAY: shfl.sync.bfly.b32 %d0, %t, 1, 31, -1;",
            "a thread that the collective needs has ended",
        ),
        (
            "setp.lt.u32 %p0, %t, 16; @%p0 bra OTHER; bar.sync 0; bra DONE; OTHER: bar.sync 0; DONE: mov.u32 %d0, 0;",
            "waits for others of its warp that do not come",
        ),
        (
            "setp.lt.u32 %p0, %t, 16; selp.b32 %x2, -1, 0xFFFF0000, %p0; bar.warp.sync %x2;",
            "threads of a warp that give different member masks",
        ),
        ("shfl.sync.idx.b32 %d0, %t, 17, 31, -1; setp.lt.u32 %p0, %t, 9; @%p0 bra LOW; bra DONE; "
         "LOW: shfl.sync.idx.b32 %d0, %t, 17, 31, 0x1FF; DONE: mov.u32 %d1, 0;",
         "a value is taken from a lane that does not take part"),
        (
            "setp.lt.u32 %p0, %t, 1; @!%p0 bra STAY; ret; STAY: mov.u32 %x1, pool; "
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d0}, [%x1];",
            "a thread that the collective needs has ended",
        ),
        (
            "{ .param .b32 param0; st.param.b32 [param0+0], %t; call.uni someone, (param0); }",
            "nobody says what someone does",
        ),
        ("FOREVER: add.u32 %x1, %x1, 1; bra FOREVER;", "the block has not ended after 10001 instructions"),
    ],
)  # fmt: skip
def test_what_ptx_leaves_undefined_is_refused(text, message):
    words = np.zeros(256, np.uint32)
    with pytest.raises(PtxError) as raised:
        interpret(COPY + text, [LANES.astype(np.uint32)], ("u4", "u4"), POOL, [words], max_steps=10_000)
    assert message in str(raised.value)


def test_a_block_of_less_than_a_warp():
    """Its threads wait for nobody else, and a warp's instruction on matrices is not for them."""
    x = np.arange(5, dtype=np.uint32)
    text = "mov.u32 %x1, pool; atom.shared.exch.b32 %x2, [%x1], 9; bar.sync 0; bar.red.popc.u32 %d0, 0, %p0;"
    (found,) = interpret("setp.gt.u32 %p0, %t, 1;" + text, [x], declare=POOL)
    assert found.tolist() == [3] * 5
    with pytest.raises(PtxError, match="has ended or never was"):
        interpret("shfl.sync.bfly.b32 %d0, %t, 1, 31, -1;", [x])


def test_functions_of_the_host_are_called():
    calls = []
    text = """setp.gt.u32 %p0, %t, 29; mov.u32 %d0, 0; @!%p0 bra DONE;
    { .param .b64 param0; cvt.u64.u32 %y0, %t; st.param.b64 [param0+0], %y0; .param .b32 param1;
    st.param.b32 [param1+0], %a0; call.uni noted, (param0, param1); }
    DONE: mov.u32 %d0, 1;"""
    interpret(text, [LANES.astype(np.uint32) * 2], functions={"noted": lambda *values: calls.append(values)})
    assert calls == [(30, 60), (31, 62)]


def test_warps_at_different_barriers_are_refused():
    text = "setp.lt.u32 %p0, %t, 32; @%p0 bra OTHER; bar.sync 0; bra DONE; OTHER: bar.sync 0; DONE: mov.u32 %d0, 0;"
    for order in (None, 1, -1):
        with pytest.raises(PtxError, match="at different barriers"):
            interpret(text, [np.arange(64, dtype=np.uint32)], warps_apart=order)
