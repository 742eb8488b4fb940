"""Mutations of bytes, and of values of JSON that may hold bytes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fuzz.target import Target

MAX_LENGTH = 1 << 20  # of texts, bytes and lists
MAX_NODES = 150  # of an input, whose neighbors are made
MAX_CHANGED_NODES = 1 << 17  # of an input that is changed as a value: aliases and repeated lists can have billions
_DROPPED = object()
Bytes = Callable[[bytes], bytes]

_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    64,
    255,
    256,
    4095,
    4096,
    65535,
    65536,
    100_000,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
)
_NUMBERS += (2**64 - 1, 2**64, 10**30, 10**4000)
_FLOATS = (0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), 1.0, 2.0**53)
_TEXTS = ("", "a", "\0", "é", "\ud800", "😀", "[", "{}", "null", "1e999", "../..", " ", "\n", "x" * 300, "%s", "01")


def mutated(target: Target, data: bytes, rng: random.Random, of_bytes: Bytes | None = None) -> bytes:
    """An input like data, of at most the target's max_bytes. of_bytes: what mutates bytes, plain changes by default."""
    change = of_bytes or (lambda piece: changed_bytes(piece, rng))
    if target.codec is not None and rng.random() < 0.7:
        try:
            value = target.codec.decode(data)
            for _ in range(1 + (rng.random() < 0.3)):
                value = changed(value, rng, target.words, change)
            encoded = target.codec.encode(value)
            if len(encoded) <= target.max_bytes:
                return encoded
        except Exception:
            pass
    return change(data)[: target.max_bytes]


def neighbors(target: Target, data: bytes) -> Iterator[bytes]:
    """Yield the input with one node dropped, or replaced by a value of each kind; this reaches most refusals."""
    yield from (data[:size] for size in (0, 1, len(data) // 2, len(data) - 1))
    if target.codec is None:
        return
    try:
        num_nodes = sum(1 for _ in _nodes(target.codec.decode(data)))
    except Exception:
        return
    for place in range(0, num_nodes, 1 + num_nodes // MAX_NODES):
        for other in (_DROPPED, None, 0, -1, 3, 2**40, 0.5, "", "x", "\ud800", True, [], {}, [1], {"a": {}}, 10**400):
            value = target.codec.decode(data)
            holder, key = next(itertools.islice(_nodes(value), place, None))
            if holder is None:
                value = other
            elif other is _DROPPED:
                del holder[key]
            else:
                holder[key] = other
            with contextlib.suppress(Exception):
                yield target.codec.encode(value)


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(found) + 1)
        size = min(len(found) - place, rng.choice((1, 1, 2, 4, 8, 32)))
        kind = rng.randrange(6)
        if rng.random() < 0.02:
            found[place:place] = rng.choice((b"[", b'{"a":', b"[{", b"a", b"(", b"\xff")) * rng.choice(
                (10, 1000, 100_000)
            )
        elif kind == 0 and size:
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[place : place + size] = rng.randbytes(size)
        elif kind == 2:
            del found[place : place + size]
        elif kind == 3:
            found[place:place] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif kind == 4:
            number = rng.choice(_NUMBERS) & (2**64 - 1)
            found[place : place + 8] = number.to_bytes(8, "little")[: rng.choice((1, 2, 4, 8))]
        else:
            other = rng.randrange(len(found) + 1)
            found[place:place] = found[other : other + rng.choice((1, 8, 64))]
    return bytes(found)


def changed(value: Any, rng: random.Random, words: Sequence[str], of_bytes: Bytes) -> Any:
    """The value with one of its nodes changed; ValueError if it has too many."""
    nodes = list(itertools.islice(_nodes(value), MAX_CHANGED_NODES + 1))
    if len(nodes) > MAX_CHANGED_NODES:
        raise ValueError("too many nodes")
    holder, key = rng.choice(nodes)
    if holder is None:
        return _new(value, value, rng, words, of_bytes)
    if isinstance(holder, dict) and rng.random() < 0.25:
        _change_keys(holder, key, rng, words)
    elif isinstance(holder, list) and rng.random() < 0.25:
        _change_items(holder, key, rng)
    else:
        holder[key] = _new(holder[key], value, rng, words, of_bytes)
    return value


def _nodes(value: Any) -> Any:
    """Yield (container, key) of every node; (None, None) for the root."""
    yield None, None
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            waiting.append(holder[key])


def _change_keys(holder: dict[Any, Any], key: Any, rng: random.Random, words: Sequence[str]) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[_text(str(key), rng, words)] = holder.pop(key)
    elif kind == 2:
        holder[_text(str(key), rng, words)] = copy.deepcopy(holder[key])
    else:
        holder[key] = copy.deepcopy(holder[rng.choice(list(holder))])


def _change_items(holder: list[Any], place: int, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del holder[place]
    elif kind == 1:
        holder.insert(place, copy.deepcopy(holder[place]))
    elif kind == 2:
        holder[place : place + 1] = _repeated([holder[place]], rng.choice((2, 10, 1000)))
    else:
        rng.shuffle(holder)


def _new(old: Any, root: Any, rng: random.Random, words: Sequence[str], of_bytes: Bytes) -> Any:
    """Something in the place of a node: of its kind most of the time."""
    if rng.random() < 0.25:
        return _other(root, rng, words)
    if isinstance(old, bool) or old is None:
        return rng.choice((True, False, None))
    if isinstance(old, int):
        near = (old + 1, old - 1, old * 2, -old, old // 2, old ^ (1 << rng.randrange(64)))
        return rng.choice((*near, *_NUMBERS))
    if isinstance(old, float):
        return rng.choice((old * 2, -old, old + 1, *_FLOATS))
    if isinstance(old, bytes):
        return of_bytes(old) if rng.random() < 0.9 else _repeated(old, rng.choice((2, 100)))
    if isinstance(old, str):
        return _text(old, rng, words)
    if isinstance(old, list):
        return _repeated(old, rng.choice((0, 2, 50))) if rng.random() < 0.7 else old[: rng.randrange(len(old) + 1)]
    return {} if rng.random() < 0.3 else {**old, _text("", rng, words): _other(root, rng, words)}


def _text(old: str, rng: random.Random, words: Sequence[str]) -> str:
    kind, place = rng.randrange(6), rng.randrange(len(old) + 1)
    if kind == 0:
        return rng.choice(_TEXTS)
    if kind == 1 and words:
        return rng.choice(words)
    if kind == 2:
        return old[:place] + rng.choice(_TEXTS) + old[place:]
    if kind == 3:
        return old[:place] + old[place + 1 :]
    if kind == 4:
        return _repeated(old, rng.choice((2, 2, 100, 10_000)))
    return old[:place] + chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) + old[place + 1 :]


def _repeated(old: Any, times: int) -> Any:
    size = sum(1 for _ in itertools.islice(_nodes(old), MAX_LENGTH)) if isinstance(old, list) else len(old)
    return old * (times if size * times <= MAX_LENGTH else 1)


def _other(root: Any, rng: random.Random, words: Sequence[str]) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(_FLOATS)
    if kind == 2:
        return _text("", rng, words)
    if kind == 3:
        return rng.choice((True, False, None, [], {}, b"[" * 100_000))
    if kind == 4:
        value: Any = rng.choice(([], {}, 1))
        for _ in range(rng.choice((2, 60, 200, 2000))):
            value = [value] if rng.random() < 0.9 else {"a": value}
        return value
    holder, key = rng.choice(list(_nodes(root)))
    return copy.deepcopy(root if holder is None else holder[key])
