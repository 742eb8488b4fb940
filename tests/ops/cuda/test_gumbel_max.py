"""The Gumbel-max draw of one block, emulated: its token and its lead, against numpy and by hand."""

import ctypes
import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from lab.reference.draw import gumbel_lead, gumbel_max_token, gumbel_runner_up
from lab.reference.philox import gumbel_uniforms
from tests.ops.cuda.emulation import emulated

THREADS = 64
BLOCK = 4 * THREADS  # tokens that a block looks at in one round
POSITION = 5


def gumbel_max(p, key, order=0):
    """(token, lead, runner-up) of weights p."""
    module = emulated("gumbel_max", {"FASER_BLOCK_THREADS": THREADS}, order, Path(__file__).parent)
    weights, tokens, lead = np.ascontiguousarray(p, np.float32), np.zeros(3, np.int32), np.zeros(1)
    arguments = (
        ctypes.c_void_p(weights.ctypes.data),
        ctypes.c_int32(weights.size),
        *map(ctypes.c_uint64, (key, POSITION)),
        *(ctypes.c_void_p(array.ctypes.data) for array in (tokens, lead)),
    )
    module.launch("gumbel_max", (1, 1, 1), (THREADS, 1, 1), arguments)
    assert tokens[0] == tokens[1], "the question changes nothing"
    return int(tokens[1]), float(lead[0]), int(tokens[2])


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 128, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 70])
def test_gumbel_max_is_the_reference(size):
    rng = np.random.default_rng(size)
    for key in range(12):
        p = rng.dirichlet(np.full(size, (0.02, 1.0, 50.0)[key % 3])).astype(np.float32)
        p[rng.random(size) < (0.0, 0.5, 0.95)[key % 3]] = 0
        p[rng.integers(size)] += np.float32(1e-3)
        token, lead, runner_up = gumbel_max(p, key, order=key % 4)
        assert token == gumbel_max_token(p, key, POSITION)
        assert runner_up == gumbel_runner_up(p, key, POSITION)
        assert lead == pytest.approx(gumbel_lead(p, key, POSITION), rel=1e-9, abs=1e-12)
        assert (lead == np.inf) == (np.count_nonzero(p) == 1)


@pytest.mark.parametrize("survivor", [0, 64, BLOCK - 1, BLOCK, 299])
def test_who_runs_alone_cannot_lose(survivor):
    p = np.zeros(300, np.float32)
    p[survivor] = 0.25
    assert gumbel_max(p, key=1) == (survivor, np.inf, -1)


def test_nobody_runs():
    assert gumbel_max(np.zeros(300), key=1) == (-1, 0.0, -1)
    assert gumbel_max([0.0], key=1) == (-1, 0.0, -1)


def thread_of(token):
    """The thread of the block that looks at a token."""
    return (token // 64 * 16 + token % 16) % THREADS


def tied_pair(times, same_thread):
    """Two tokens and weights with which both take the same time to the last bit: times as close to a ratio of two
    whole numbers below 2^24 as their rounding."""
    for a, b in combinations(range(len(times)), 2):
        if (thread_of(a) == thread_of(b)) != same_thread:
            continue
        ratio = Fraction(times[a] / times[b]).limit_denominator(2**24 - 1)
        pa, pb = ratio.numerator * 2.0**-24, ratio.denominator * 2.0**-24
        if max(pa, pb) <= 1 and pa > 0 and times[a] / pa == times[b] / pb:
            return a, b, pa, pb
    raise AssertionError("no pair ties")


@pytest.mark.parametrize("same_thread", [False, True])
@pytest.mark.parametrize("key", range(4))
def test_a_tie_goes_to_the_lower_id_and_is_no_lead(key, same_thread):
    size = BLOCK + 100
    times = [-math.log1p(-u) for u in gumbel_uniforms(key, POSITION, size).tolist()]
    a, b, pa, pb = tied_pair(times, same_thread)
    p = np.zeros(size, np.float32)
    p[a], p[b] = pa, pb
    for order in range(4):
        assert gumbel_max(p, key, order) == (a, 0.0, b)

    winner = next(token for token in range(size) if token not in (a, b))
    p[winner] = 2 * times[winner] / (times[a] / pa)
    for order in range(4):
        token, lead, runner_up = gumbel_max(p, key, order)
        assert (token, runner_up) == (winner, a)
        assert lead == pytest.approx(math.log(2), rel=1e-6), "two who tie for the second place are as far behind"
