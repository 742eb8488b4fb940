"""The arithmetic that the accept kernels share, compiled for the host: bit for bit what numpy and plugins/cpu do."""

import ctypes
import os
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.errors import FaserError
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.compiler import include_dirs, source_dir
from faser_trtllm.ops.philox import Stream, philox4x32
from lab.reference.philox import gumbel_uniforms, uniform
from lab.reference.probs import exp_non_positive
from tests.ops.cuda.emulation import EMULATOR_DIR
from tests.ops.philox_answers import KNOWN_ANSWERS

U32, U64, I32, F32, F64, PTR = (
    *(ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_double, ctypes.c_void_p),
)
SIGNATURES = {
    "host_philox": (None, [PTR, U64, PTR]),
    "host_uniform": (F64, [U64, U64, I32]),
    "host_gumbel_uniforms": (None, [U64, U64, I32, PTR, PTR]),
    "host_exp": (None, [PTR, I32, PTR]),
    "host_ranks": (None, [PTR, I32, PTR, PTR, PTR]),
    "host_fixed": (U64, [F32, I32]),
    "host_weight_shift": (I32, [I32]),
    "host_mass_wanted": (U64, [F32, U64]),
    "host_drawn_mass": (U64, [U64, U64]),
    "host_arrival_time_above": (F32, [U32, F32]),
    "host_can_win_gumbel_max": (I32, [U32, F32, F32]),
    "host_rough_time": (F32, [U32, F32]),
    "host_is_extreme": (I32, [U32]),
    "host_sampling_size": (I32, []),
    "host_sampling_offsets": (None, [PTR]),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no host C++ compiler (CXX, c++)")
    try:
        folders = include_dirs()
    except FaserError as error:
        pytest.skip(str(error))
    library = tmp_path_factory.mktemp("distribution") / "probs_on_host.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-Wno-unknown-pragmas", "-I", str(source_dir()), "-I", str(EMULATOR_DIR)]
    command += [argument for folder in folders for argument in ("-isystem", str(folder))]
    command += ["-o", str(library), str(Path(__file__).parent / "probs_on_host.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(host, counter, key, words):
    out = np.zeros(4, np.uint32)
    host.host_philox(np.array(counter, np.uint32).ctypes.data, key, out.ctypes.data)
    assert out.tolist() == list(words) == philox4x32(counter, key).tolist()


def test_uniforms_are_the_host_s(host):
    rng = np.random.default_rng(1)
    for key, index in rng.integers(0, 2**63, (200, 2)).tolist():
        for stream in Stream:
            assert host.host_uniform(key * 2 + 1, index, stream) == uniform(key * 2 + 1, index, stream)


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 65, 1000])
def test_gumbel_uniforms_are_the_host_s(host, vocab_size):
    for key, position in ((0, 0), (2**64 - 1, 7), (12345, 2**33 + 5)):
        found, high = np.zeros(vocab_size), np.zeros(vocab_size, np.uint32)
        host.host_gumbel_uniforms(key, position, vocab_size, found.ctypes.data, high.ctypes.data)
        expected = gumbel_uniforms(key, position, vocab_size)
        assert found.tolist() == expected.tolist()
        assert (np.floor(expected * 2**32) == high).all()


def test_exp_is_the_host_s_bit_for_bit(host):
    rng = np.random.default_rng(2)
    edges = [0, -0.0, -72, np.nextafter(np.float32(-72), np.float32(-99)), -1e-30, -1e30, -np.inf, -0.3465736]
    z = np.concatenate([edges, -rng.random(200_000) * 80, -rng.random(1000) * 1e-6]).astype(np.float32)
    found = np.zeros_like(z)
    host.host_exp(z.ctypes.data, z.size, found.ctypes.data)
    with np.errstate(invalid="ignore"):
        expected = exp_non_positive(z)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_ranks_order_as_lexsort_does(host):
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [[0.0, -0.0, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45], np.round(rng.standard_normal(500) * 3, 1)]
    )
    x = rng.permutation(x).astype(np.float32)
    ranks, values, ids = np.zeros(x.size, np.uint64), np.zeros_like(x), np.zeros(x.size, np.int32)
    host.host_ranks(x.ctypes.data, x.size, ranks.ctypes.data, values.ctypes.data, ids.ctypes.data)
    order = np.lexsort((np.arange(x.size), -x.astype(np.float64)))
    assert np.argsort(ranks)[::-1].tolist() == order.tolist()
    assert values.tolist() == x.tolist()
    assert ids.tolist() == list(range(x.size))


def test_fixed_point_is_exact_where_it_can_be(host):
    rng = np.random.default_rng(4)
    for shift in (31, 45, 60, 62):
        for value in [0.0, 1.0, 0.5, 2.0**-shift, *rng.random(100), *(rng.random(100) * 2.0 ** (20 - shift))]:
            exact = Fraction(float(np.float32(value))) * 2**shift
            assert host.host_fixed(value, shift) == round(exact)
    assert host.host_fixed(2.0**-80, 60) == 0


def test_sums_of_weights_fit(host):
    for n in (1, 2, 3, 1000, 128_256, 151_936, 1 << 24, (1 << 24) - 1):
        shift = host.host_weight_shift(n)
        assert n << shift <= 2**62
        assert n << (shift + 1) > 2**62 or n == 1


def test_mass_wanted_is_the_first_that_reaches(host):
    rng = np.random.default_rng(5)
    for total in [1, 7, 2**62, 2**40 + 1, *rng.integers(1, 2**62, 50).tolist()]:
        for top_p in [1e-30, 0.5, 0.25, np.float32(0.1), np.nextafter(np.float32(1), np.float32(0)), *rng.random(5)]:
            wanted = float(np.float32(top_p)) * float(total)
            found = host.host_mass_wanted(top_p, total)
            assert 1 <= found <= total
            assert float(found) >= wanted or found == total
            assert found == 1 or float(found - 1) <= wanted
    assert host.host_mass_wanted(0.5, 2**40) == 2**39


def test_drawn_mass_is_rounded_down_exactly(host):
    rng = np.random.default_rng(6)
    for total in [1, 2, 3, 2**63, 2**64 - 1, *rng.integers(1, 2**62, 100).tolist()]:
        for bits in [0, 1, 2**53 - 1, *rng.integers(0, 2**53, 10).tolist()]:
            assert host.host_drawn_mass(bits, total) == bits * total // 2**53


def test_the_gumbel_bounds_hold(host):
    """The true time of any number that begins with the word is at most the bound, and the check lets it pass."""
    rng = np.random.default_rng(7)
    words = [0, 1, 255, 256, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 2, *rng.integers(0, 2**32, 3000).tolist()]
    for word in words:
        for p in np.float32([1, 0.3, 1e-20, 1.2345e-30]):
            above = host.host_arrival_time_above(word, p)
            highest = (word * 2**20 + 2**20 - 1 + 0.5) * 2.0**-52
            time = -np.log1p(-highest) / float(p)
            assert above >= time
            lowest = -np.log1p(-(word * 2**20 + 0.5) * 2.0**-52) / float(p)
            assert host.host_can_win_gumbel_max(word, p, np.float32(lowest))
    assert host.host_arrival_time_above(2**32 - 1, 1.0) == np.inf
    assert host.host_arrival_time_above(2**31, 1.0) < np.log(2) * 1.0001
    assert not host.host_can_win_gumbel_max(2**31, 1.0, 0.4)


def test_estimated_times_are_near(host):
    """Estimates are within 0.2 % of the true time of any number that begins with a word that is not extreme."""
    rng = np.random.default_rng(8)
    edges = [512, 513, 1000, 2**25 - 1, 2**25, 2**25 + 1, 2**31, 2**32 - 514, 2**32 - 513]
    for word in [*edges, *rng.integers(512, 2**32 - 512, 3000).tolist(), *rng.integers(512, 2**20, 500).tolist()]:
        for part in (0.5 * 2**-20, 1 - 0.5 * 2**-20):
            exact = -np.log1p(-(word + part) * 2.0**-32)
            for exponent in (0.0, 0.3, 30.0):
                time = host.host_rough_time(word, exponent)
                assert time == pytest.approx(exact * 2**exponent, rel=2e-3)
        assert not host.host_is_extreme(word)
    assert all(host.host_is_extreme(word) for word in (0, 511, 2**32 - 512, 2**32 - 1))
    assert host.host_rough_time(2**31, np.inf) == np.inf


def test_the_table_has_the_host_s_layout(host):
    offsets = np.zeros(len(SAMPLING_DTYPE.names), np.int32)
    host.host_sampling_offsets(offsets.ctypes.data)
    assert host.host_sampling_size() == SAMPLING_DTYPE.itemsize
    assert offsets.tolist() == [SAMPLING_DTYPE.fields[name][1] for name in SAMPLING_DTYPE.names]
