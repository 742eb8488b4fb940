"""Launches that are repeated: what is launched, with which addresses, and when it is made again."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda import gated_silu
from faser_trtllm.ops.cuda.append_kv import QkvNorm, Rope
from faser_trtllm.ops.cuda.driver import OnStream
from faser_trtllm.ops.cuda.launch_cache import LaunchCache
from faser_trtllm.ops.cuda.tensors import PagedKv, Pointer


class Launched:
    """Keeps what it is given: kernel, grid, block, values of the arguments, stream."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def launch(self, kernel, grid, block, arguments, stream=0) -> None:
        self.launches.append((kernel, grid, block, [argument.value for argument in arguments], stream))


class Op:
    """An op of two launches over two tensors that counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def of(self, first: torch.Tensor, second: torch.Tensor):
        def launch(to) -> None:
            self.num_calls += 1
            number = ctypes.c_int32(self.num_calls)
            to.launch("first", (self.num_calls, 1, 1), (32, 1, 1), [Pointer.to(second), number, Pointer.to(first)])
            to.launch("second", (2, 1, 1), (64, 1, 1), [Pointer(), Pointer.to(second), Pointer.to(second)])

        return launch


def test_an_op_is_asked_once_for_a_key_and_launched_with_the_addresses_of_each_call() -> None:
    cache, op, launched = LaunchCache(), Op(), Launched()
    pairs = [(torch.zeros(2), torch.zeros(2)) for _ in range(3)]
    for stream, pair in enumerate(pairs):
        cache.launch("key", pair, OnStream(launched, lambda stream=stream: stream), op.of(*pair))
    assert op.num_calls == 1
    expected = []
    for stream, (x, y) in enumerate((x.data_ptr(), y.data_ptr()) for x, y in pairs):
        expected.append(("first", (1, 1, 1), (32, 1, 1), [y, 1, x], stream))
        expected.append(("second", (2, 1, 1), (64, 1, 1), [None, y, y], stream))
    assert launched.launches == expected
    cache.launch("other", pairs[0], OnStream(launched, lambda: 3), op.of(*pairs[0]))
    assert op.num_calls == 2
    assert launched.launches[-2][1] == (2, 1, 1)


def test_what_is_refused_is_not_kept() -> None:
    cache, launched = LaunchCache(), Launched()
    rows = torch.zeros((2, 12), dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="out has rows of 12"):
            cache.launch(
                "key",
                (rows,),
                OnStream(launched, lambda: 0),
                lambda to: gated_silu.launch(to, rows, rows, None, 1e-5, rows),
            )
    assert not launched.launches
    assert len(cache) == 0


def test_an_address_that_would_not_change_is_refused() -> None:
    """The caller has not named the tensor, so the next launch would go to the memory of this one."""
    cache, op, launched = LaunchCache(), Op(), Launched()
    x, y = torch.zeros(2), torch.zeros(2)
    with pytest.raises(KeyError):
        cache.launch("key", (x,), OnStream(launched, lambda: 0), op.of(x, y))
    assert not launched.launches


def test_tensors_are_not_kept() -> None:
    cache, op, launched = LaunchCache(), Op(), Launched()
    x, y = torch.zeros(2), torch.zeros(2)
    kept = [weakref.ref(tensor) for tensor in (x, y)]
    cache.launch("key", (x, y), OnStream(launched, lambda: 0), op.of(x, y))
    del x, y
    gc.collect()
    assert [tensor() for tensor in kept] == [None, None]


def layer(ops: Ops, rows: int, **changed) -> None:
    """The kernels of a layer, over tensors of their own."""
    sizes = {"heads": 4, "kv_blocks": 6, "requests": 2, "max_blocks": 20, "positions": 96, "hidden": 64, "eps": 1e-5}
    sizes |= changed
    bf16 = {"dtype": torch.bfloat16}
    hidden = torch.zeros((rows, sizes["hidden"]), **bf16)
    qkv, q = (torch.zeros((rows, count, 64), **bf16) for count in (sizes["heads"] + 4, sizes["heads"]))
    keys, values = (torch.zeros((sizes["kv_blocks"], 2, 32, 64), **bf16) for _ in range(2))
    cos, sin = (torch.zeros((sizes["positions"], 32)) for _ in range(2))
    ints = {"dtype": torch.int32}
    positions, cu_q_lens = torch.zeros(rows, **ints), torch.zeros(sizes["requests"] + 1, **ints)
    table, kv_lens = (
        torch.zeros((sizes["requests"], sizes["max_blocks"]), **ints),
        torch.zeros(sizes["requests"], **ints),
    )
    bias, weight = torch.zeros(qkv[0].numel(), **bf16), torch.zeros(64, **bf16)
    norm = QkvNorm(hidden, sizes["eps"], bias if "bias" in changed else None, weight if "q_norm" in changed else None)
    kv = PagedKv(keys, values, table, cu_q_lens, kv_lens)
    ops.append_kv(qkv.view(rows, -1), Rope(cos, sin, positions), kv, q, norm)
    bounds = {"max_query_rows": changed.get("query_rows", 16), "max_kv_len": changed.get("kv_len", 96)}
    window = changed.get("window", 0)
    ops.verify_attention(q, kv, torch.zeros_like(q), window=window, **bounds)
    ops.gated_silu(torch.zeros((rows, 256), **bf16), hidden, torch.zeros(256, **bf16), sizes["eps"])


CHANGES = [
    {"rows": 6},
    {"kv_blocks": 7},
    {"requests": 3},
    {"heads": 8},
    {"max_blocks": 21},
    {"kv_len": 640},  # a second launch
    {"positions": 64},
    {"hidden": 128},
    {"eps": 1e-6},
    {"bias": True},
    {"q_norm": True},
    {"query_rows": 2},
    {"window": 24},
]


def without_pointers(launches: list[tuple]) -> list[tuple]:
    return [
        (kernel, grid, block, [value for value in values if value is not None and value < 1 << 32])
        for kernel, grid, block, values, _ in launches
    ]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "+".join(change))
def test_a_layer_after_another_is_launched_as_if_it_were_the_first(change: dict) -> None:
    """Whatever sizes change: nothing of the launches before is taken for it."""
    fresh, other = Launched(), Launched()
    sizes = {"rows": 5} | change
    layer(Ops(dict.fromkeys(("append_kv", "verify_attention", "gated_silu"), fresh), lambda: 0, 4), **sizes)
    ops = Ops(dict.fromkeys(("append_kv", "verify_attention", "gated_silu"), other), lambda: 0, 4)
    for before in ({"rows": 5}, sizes):  # the second time only addresses are new
        layer(ops, **before)
    other.launches.clear()
    layer(ops, **sizes)
    assert without_pointers(other.launches) == without_pointers(fresh.launches)
    nulls = [[value is None for value in launch[3]] for launch in fresh.launches]
    assert [[value is None for value in launch[3]] for launch in other.launches] == nulls
