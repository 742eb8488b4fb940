"""Philox4x32-10 against the known answers of Random123, and its uniforms."""

import numpy as np
import pytest

from faser_trtllm.ops.philox import Stream, philox4x32, race_uniforms, uniform

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key).tolist() == list(words)


def test_uniforms_differ_by_key_index_and_stream():
    numbers = [
        uniform(key, index, stream)
        for key in (0, 1, 2**32)
        for index in (0, 1, 2**32)
        for stream in (Stream.TEST, Stream.RECOVER, Stream.BONUS, Stream.DRAFT)
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= u < 1 for u in numbers)


def test_race_uniforms_depend_on_the_token_not_on_the_vocabulary():
    short, long = race_uniforms(7, 11, 33), race_uniforms(7, 11, 100)
    assert (short == long[:33]).all()
    assert np.unique(long).size == 100
    assert (long > 0).all()
    assert (long < 1).all()
