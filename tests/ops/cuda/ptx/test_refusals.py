"""Tests of the interpreter's errors for wrong texts: misuse, missing barriers, copies that nobody waits for.

What instructions compute is not tested here: were it wrong, a kernel would differ from its reference.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.cuda.ptx.interpreter.program import PtxError
from tests.ops.cuda.ptx.snippet import interpret

LANES = np.arange(32)
POOL = ".shared .align 16 .b8 pool[1024];"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.b32 %d0, %a0;", "line 20: frobnicate.b32 %d0, %a0: this instruction is unknown here"),
        ("add.rn.f16 %d0, %a0, %a0;", "this instruction is unknown here"),
        ("add.sideways.s32 %d0, %a0, %a0;", "this instruction is unknown here"),
        ("mul.s32 %d0, %a0, %a0;", "this instruction is unknown here"),
        ("add.s64 %d0, %a0, %a0;", "a register of 32 bits does not fit .s64"),
        ("and.pred %p0, %a0, %p0;", "a predicate and a number are confused"),
        ("mov.u32 %d0, %nope;", "register %nope is not declared"),
        ("mov.u32 %d0, %smid.x;", "special register %smid.x is unknown"),
        ("bra NOWHERE;", "the label is missing"),
        ("add.s32 %d0, %x7, 1;", "thread 0 reads %x7, which it has not written"),
        ("setp.lt.u32 %p0, %t, 5; @%p0 mov.u32 %x1, 1; add.s32 %d0, %x1, 1;", "thread 5 reads %x1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, message):
    with pytest.raises(PtxError) as raised:
        interpret(text, [np.arange(32, dtype=np.uint32)])
    assert message in str(raised.value)


def test_a_missing_barrier_shows_in_an_order_of_warps():
    x = np.arange(64, dtype=np.uint32) + 1
    text = """shl.b32 %x0, %t, 2; mov.u32 %x1, pool; add.s32 %x2, %x1, %x0; st.shared.u32 [%x2], %a0;
    xor.b32 %x3, %x0, 128; add.s32 %x2, %x1, %x3; ld.shared.u32 %d0, [%x2];"""
    wanted = np.roll(x, 32).tolist()
    assert interpret(text, [x], declare=POOL)[0].tolist() == wanted, "all warps together hide it"
    for order in (1, -1):
        assert interpret(text, [x], declare=POOL, warps_apart=order)[0].tolist() != wanted


def test_warps_at_different_barriers_are_refused():
    text = "setp.lt.u32 %p0, %t, 32; @%p0 bra OTHER; bar.sync 0; bra DONE; OTHER: bar.sync 0; DONE: mov.u32 %d0, 0;"
    for order in (None, 1, -1):
        with pytest.raises(PtxError, match="at different barriers"):
            interpret(text, [np.arange(64, dtype=np.uint32)], warps_apart=order)


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
