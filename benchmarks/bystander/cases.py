"""The worst requests: each input at its limits, beyond them, in pairs, and bodies of 4 MB."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.bystander.worst import WRITTEN, Fields, worst_of
from faser_trtllm.serving.client import CLIENT_HEADER, INPUT_DTYPES, to_tensor
from faser_trtllm.serving.triton.contract import INPUTS, MAX_LISTS
from faser_trtllm.serving.triton.request import MAX_RETURN_SEQUENCES, MAX_SEQUENCES

BASE: Fields = {"text_input": "def quicksort(items):", "max_tokens": 32, "end_id": -1, "stream": True}
SHAPE = ("text_input", "input_ids", "max_tokens", "num_return_sequences", "stream")
"""Inputs that set how much work a plain request is."""

HEAVY: Fields = {
    **WRITTEN["stop_words"].limits[0],
    **WRITTEN["bad_words"].limits[1],
    **WRITTEN["embedding_bias_words"].limits[1],
}
"""Costly inputs that a request carries when another input must get it refused."""

WHOLE = ("http", "grpc")
Body = bytes


@dataclass(frozen=True)
class Case:
    """One worst request. batch: number of prompts, over gRPC only. fields: inputs of the model `faser`.

    client: the sender's name, as set by a proxy. is_allowed: it must be served.
    """

    name: str
    fields: Fields
    transport: str = "http"
    batch: int = 1
    request_id: str = "x"
    client: str = "attacker"
    is_allowed: bool = False
    num_sequences: int = field(init=False)

    def __post_init__(self) -> None:
        number = int(self.fields.get("num_return_sequences", 1))
        object.__setattr__(self, "num_sequences", self.batch * number)

    @property
    def is_endless(self) -> bool:
        """True if the request runs for as long as its client reads."""
        return int(self.fields.get("max_tokens", 16)) > 1024

    def plain(self) -> Case:
        """Return a case with as many sequences of the same prompts and lengths, and no other inputs."""
        kept = {name: value for name, value in self.fields.items() if name in SHAPE}
        own = {"end_id": -1, "cache_salt": f"plain {self.name}"}  # so that no cached block of the case is reused
        return Case(f"{self.name} (plain)", {**kept, **own}, self.transport, self.batch, is_allowed=True)

    def body(self) -> Body:
        if self.transport == "http":
            return json.dumps({**self.fields, CLIENT_HEADER: self.client}).encode()
        request = service_pb2.ModelInferRequest(model_name="faser", id=self.request_id)
        request.parameters[CLIENT_HEADER].string_param = self.client
        for name, value in self.fields.items():
            tensor = np.repeat(to_tensor(name, value), self.batch, axis=0)
            request.inputs.add(name=name, datatype=INPUT_DTYPES[name], shape=tensor.shape)
            request.raw_input_contents.append(_content(tensor))
        return bytes(request.SerializeToString())


def _content(tensor: np.ndarray[Any, Any]) -> bytes:
    if tensor.dtype == np.object_:
        return b"".join(len(item).to_bytes(4, "little") + item for item in tensor.reshape(-1))
    return tensor.tobytes()


def all_cases() -> list[Case]:
    return [*at_limits(), *beyond(), *in_pairs(), *large()]


def at_limits() -> Iterator[Case]:
    """Yield each input at each of its limits, with as many sequences as allowed, over HTTP and gRPC in turn."""
    for number, (name, fields) in enumerate((one, found) for one in INPUTS for found in worst_of(one).limits):
        yield _case(f"{name} at a limit {number}", fields, WHOLE[number % 2], is_allowed=True)


def beyond() -> Iterator[Case]:
    """Yield each input just beyond a limit, in a request that would be costly to serve."""
    number = 0
    for name in INPUTS:
        for fields in worst_of(name).beyond:
            number += 1
            yield _case(f"{name} beyond a limit {number}", {**HEAVY, **fields}, WHOLE[number % 2])


def large() -> Iterator[Case]:
    """Yield bodies of 4 MB, and 64 prompts of 64 KB."""
    number = 0
    for name in INPUTS:
        for fields in worst_of(name).large:
            number += 1
            yield _case(f"{name} of 4 MB {number}", fields, WHOLE[number % 2])
    prompt = {"text_input": "def f(x): " * 6000, "num_return_sequences": MAX_SEQUENCES // 64}
    yield Case("64 prompts of 60 KB", {**BASE, **prompt}, "grpc", batch=64)
    short = {**BASE, "num_return_sequences": MAX_SEQUENCES // 64, "max_tokens": 8}
    yield Case("64 prompts x 4 sequences with heavy words", {**short, **HEAVY}, "grpc", batch=64)
    yield Case("a request id of 4 MB", {**BASE, "num_return_sequences": 64}, "grpc", request_id="x" * (4 << 20))


def _case(name: str, fields: Fields, transport: str, is_allowed: bool = False) -> Case:
    sequences = {} if "num_return_sequences" in fields else {"num_return_sequences": MAX_RETURN_SEQUENCES}
    found = {**BASE, **sequences, **fields}
    if "input_ids" in fields:
        del found["text_input"]
    if found["max_tokens"] > 1024 or not _fits(found):
        transport = "http"  # only HTTP clients may hang up, or send a number of a wrong type
    if found["max_tokens"] > 1024:
        found["stream"] = True
    return Case(name, found, transport, is_allowed=is_allowed)


def _fits(fields: Mapping[str, Any]) -> bool:
    try:
        for name, value in fields.items():
            to_tensor(name, value)
    except OverflowError:
        return False
    return True


def in_pairs(seed: int = 0) -> Iterator[Case]:
    """Yield requests that cover all pairs of limits of inputs, sequences, batch sizes, stream and transport."""
    factors: dict[str, Sequence[Any]] = {
        name: [{}, *worst_of(name).limits] for name in INPUTS if name not in ("stream", "stop", "num_return_sequences")
    }
    factors["shape"] = [(1, 1), (MAX_RETURN_SEQUENCES, 1), (16, MAX_LISTS)]  # sequences of a prompt, prompts
    factors["stream"] = [True, False]
    factors["door"] = WHOLE
    for number, chosen in enumerate(covering(list(factors.values()), seed)):
        found = dict(zip(factors, chosen, strict=True))
        (sequences, batch), stream, door = found.pop("shape"), found.pop("stream"), found.pop("door")
        fields = {**BASE, "num_return_sequences": sequences, "stream": stream}
        for part in found.values():
            fields |= part
        if "input_ids" in fields:
            del fields["text_input"]
        if "return_generation_logits" in fields:  # a limit for all sequences together
            fields |= {
                name: min(BASE["max_tokens"], fields[name]) for name in ("max_tokens", "min_tokens") if name in fields
            }
        if fields["max_tokens"] > 1024:
            fields["stream"], door = True, "http"
        batch = batch if door == "grpc" else 1
        yield Case(f"pairs {number}", fields, door, batch, is_allowed=True)


def covering(levels: Sequence[Sequence[Any]], seed: int = 0) -> list[tuple[Any, ...]]:
    """Return a pairwise covering array: rows with one level of each factor that contain every pair of levels."""
    random = Random(seed)
    places = range(len(levels))
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(places, 2)
        for i in range(len(levels[a]))
        for j in range(len(levels[b]))
    }
    rows = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        row = {a: i, b: j}
        for place in random.sample(places, len(places)):
            if place not in row:
                gains = [
                    sum(_pair(place, level, other, at) in open_pairs for other, at in row.items())
                    for level in range(len(levels[place]))
                ]
                best = max(gains)
                row[place] = random.choice([level for level, gain in enumerate(gains) if gain == best])
        open_pairs -= {_pair(a, row[a], b, row[b]) for a, b in itertools.combinations(places, 2)}
        rows.append(tuple(levels[place][row[place]] for place in places))
    return rows


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)
