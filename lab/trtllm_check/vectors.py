"""Golden vectors of the scheduling rules, and a runner for TensorRT-LLM's schedulers.

Tests run the same vectors on our own scheduler; where the two differ on purpose, a vector names the difference
(README.md of this folder) and our result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.trtllm.gate import Bindings
from faser_trtllm.trtllm.kv_cache import TrtllmKVCacheManager

VECTORS = Path(__file__).parent / "vectors.json"


@dataclass(frozen=True, slots=True)
class VectorLimits:
    """Limits of a vector's service. chunking: None runs each context in one chunk."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_blocks: int
    tokens_per_block: int
    chunk_unit_size: int
    chunking: str | None
    capacity: str


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """A request. generated: tokens after the prompt, the last without KV. position: context tokens already run."""

    prompt: int
    max_tokens: int
    generated: int = 0
    drafts: int = 0
    position: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def num_computed_tokens(self) -> int:
        return self.num_tokens - 1 if self.generated else self.position

    @property
    def has_started(self) -> bool:
        return self.num_computed_tokens > 0


@dataclass(frozen=True)
class Schedule:
    """One step, by the index of each request in the vector ("0", "1", ...). None is not compared."""

    context: Mapping[str, int]
    generation: Mapping[str, int]
    paused: tuple[str, ...]
    blocks: Mapping[str, int] | None = None
    blocks_after: Mapping[str, int] | None = None

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Schedule:
        return cls(**{**data, "paused": tuple(data["paused"])})

    def seen_as(self, expected: Schedule) -> Schedule:
        """Return this schedule with the fields of the expected one only."""
        return Schedule(
            self.context,
            self.generation,
            self.paused,
            None if expected.blocks is None else self.blocks,
            None if expected.blocks_after is None else self.blocks_after,
        )


@dataclass(frozen=True)
class Vector:
    id: str
    limits: VectorLimits
    requests: tuple[VectorRequest, ...]
    expect: Schedule
    accepted: Mapping[str, int] = field(default_factory=dict)
    difference: str | None = None
    native: Schedule | None = None


def load_vectors(path: Path = VECTORS) -> list[Vector]:
    document = json.loads(path.read_text())
    return [
        Vector(
            id=item["id"],
            limits=VectorLimits(**document["defaults"] | item["limits"]),
            requests=tuple(VectorRequest(**request) for request in item["requests"]),
            expect=Schedule.load(item["expect"]),
            accepted=item.get("accepted", {}),
            difference=item.get("difference"),
            native=Schedule.load(item["native"]) if "native" in item else None,
        )
        for item in document["vectors"]
    ]


def run_on_tensorrt_llm(vector: Vector, bindings: Bindings) -> Schedule:
    """Run the vector's step with TensorRT-LLM's classes; their exceptions pass through."""
    limits = vector.limits
    kv = TrtllmKVCacheManager(
        bindings, limits.num_blocks, limits.tokens_per_block, len(vector.requests), limits.max_seq_len
    )
    llm_requests = [_llm_request(place, request, kv, bindings) for place, request in enumerate(vector.requests)]
    capacity = bindings.CapacityScheduler(
        max_num_requests=limits.max_batch_size,
        capacity_scheduler_policy=getattr(bindings.CapacitySchedulerPolicy, limits.capacity),
        has_kv_cache_manager=True,
    )
    chunking = None
    if limits.chunking is not None:
        policy = getattr(bindings.ContextChunkingPolicy, limits.chunking)
        chunking = bindings.ContextChunkingConfig(policy, limits.chunk_unit_size)
    micro_batch = bindings.MicroBatchScheduler(ctx_chunk_config=chunking, max_context_length=limits.max_num_tokens)
    fitting, _, paused = capacity(llm_requests, kv.impl)
    contexts, generations = micro_batch(fitting, bindings.ReqIdsSet(), limits.max_batch_size, limits.max_num_tokens)
    for llm_request in paused:
        kv.free(llm_request.request_id)
    held = {place for place, request in enumerate(vector.requests) if request.has_started}
    held -= {llm_request.request_id for llm_request in paused}
    for llm_request in contexts:
        place = llm_request.request_id
        if place not in held:
            _open(kv, place, llm_request, vector.requests[place].prompt)
            held.add(place)
    for llm_request in generations:
        request = vector.requests[llm_request.request_id]
        kv.allocate(llm_request.request_id, request.num_tokens + request.drafts)
    blocks = {str(place): kv.num_held_blocks(place) for place in sorted(held)}
    for place_text, accepted in vector.accepted.items():
        place = int(place_text)
        kv.rewind(place, vector.requests[place].num_tokens + accepted)
    return Schedule(
        {str(c.request_id): int(c.context_chunk_size) for c in contexts},
        {str(g.request_id): int(g.num_draft_tokens) for g in generations},
        tuple(sorted(str(p.request_id) for p in paused)),
        blocks,
        {str(place): kv.num_held_blocks(place) for place in sorted(held)},
    )


def _llm_request(place: int, request: VectorRequest, kv: TrtllmKVCacheManager, bindings: Bindings) -> Any:
    """Return a request in the vector's state, made by the calls of a service. Its id is its place."""
    llm_request = bindings.LlmRequest(
        request_id=place,
        max_new_tokens=request.max_tokens,
        input_tokens=[1 + place] * request.prompt,
        sampling_config=bindings.SamplingConfig(1),
        is_streaming=False,
    )
    if not request.has_started:
        return llm_request
    _open(kv, place, llm_request, request.prompt)
    llm_request.context_chunk_size = request.prompt if request.generated else request.position
    llm_request.move_to_next_context_chunk()
    if request.generated:
        llm_request.state = bindings.LlmRequestState.GENERATION_IN_PROGRESS
        for _ in range(request.generated):
            llm_request.add_new_token(0, 0)
        kv.allocate(place, request.num_computed_tokens)
        llm_request.draft_tokens = [0] * request.drafts
    return llm_request


def _open(kv: TrtllmKVCacheManager, place: int, llm_request: Any, num_tokens: int) -> None:
    kv.hold(place, llm_request)
    kv.add_sequence(place, np.zeros(0, np.int32), num_tokens)
