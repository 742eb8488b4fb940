"""Launches that are repeated: what is launched, and when it is made again."""

from __future__ import annotations

import ctypes

import pytest
import torch

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import gated_silu
from faser_trtllm.ops.cuda.launch import launch_cache
from faser_trtllm.ops.cuda.launch.launch_cache import LaunchCache, key_of


class Launched:
    """Keeps what it is given: kernel, grid, block, values of the arguments, stream."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def launch(self, kernel, grid, block, arguments, stream=0) -> None:
        self.launches.append((kernel, grid, block, [argument.value for argument in arguments], stream))


class Op:
    """An op of two launches that counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, to) -> None:
        self.num_calls += 1
        to.launch("first", (self.num_calls, 1, 1), (32, 1, 1), [ctypes.c_int32(self.num_calls)])
        to.launch("second", (2, 1, 1), (64, 1, 1), [ctypes.c_void_p(None)])


def test_an_op_is_asked_once_for_a_key_and_launched_each_time() -> None:
    cache, op, launched = LaunchCache(), Op(), Launched()
    for stream in (3, 4):
        cache.launch("key", launched, stream, op)
    assert op.num_calls == 1
    assert launched.launches == [
        launch
        for stream in (3, 4)
        for launch in (("first", (1, 1, 1), (32, 1, 1), [1], stream), ("second", (2, 1, 1), (64, 1, 1), [None], stream))
    ]
    cache.launch("other", launched, 3, op)
    assert op.num_calls == 2
    assert launched.launches[-2][1] == (2, 1, 1)


def test_what_is_refused_is_not_kept() -> None:
    cache, launched = LaunchCache(), Launched()
    rows = torch.zeros((2, 12), dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="out has rows of 12"):
            cache.launch("key", launched, 0, lambda to: gated_silu.launch(to, rows, rows, None, 1e-5, rows))
    assert not launched.launches
    assert len(cache) == 0


def test_few_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_LAUNCHES", 3)
    cache, op, launched = LaunchCache(), Op(), Launched()
    for key in (1, 2, 3, 4, 4, 3):
        cache.launch(key, launched, 0, op)
        assert len(cache) <= 3
    assert op.num_calls == 5
    assert len(launched.launches) == 12


def test_keys_tell_addresses_shapes_and_what_is_missing_apart() -> None:
    x = torch.zeros((4, 6))
    keys = [key_of(x), key_of(x[1:]), key_of(x[:3]), key_of(x.view(6, 4)), key_of(None), key_of(x, None)]
    assert len(set(keys)) == len(keys)
    assert key_of(x) == key_of(x.view(4, 6))
