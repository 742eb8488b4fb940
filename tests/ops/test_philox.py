"""Philox4x32-10 against the known answers of Random123, and its uniforms."""

import numpy as np
import pytest

from faser_trtllm.ops.philox import Stream, philox4x32
from lab.reference.philox import gumbel_uniforms, uniform
from tests.ops.philox_answers import KNOWN_ANSWERS


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


def test_gumbel_uniforms_depend_on_the_token_not_on_the_vocabulary():
    short, long = gumbel_uniforms(7, 11, 33), gumbel_uniforms(7, 11, 100)
    assert (short == long[:33]).all()
    assert np.unique(long).size == 100
    assert (long > 0).all()
    assert (long < 1).all()
