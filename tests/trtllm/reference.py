"""One scheduling step by our rules: TensorRT-LLM's, which tests/trtllm/rules.py has, with the documented differences.

*Blocks.* A generation holds the blocks of all tokens but its last, which this step computes; a context those of what it
has computed.

*Capacity.* With GUARANTEED_NO_EVICT a newcomer must find the blocks of its longest end, beside those that everybody
else may still need. With MAX_UTILIZATION it needs those of its prompt and of one token more; where a running request
finds none, the last that runs gives its blocks back and waits, and nobody is admitted.

*Rows.* Generations have one each, the first prompt its first chunk, drafts what is left, first come first served; then
prompts in their order. A chunk that is not the last of its prompt is a multiple of the unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.trtllm_check.vectors import Schedule, Vector, VectorLimits
from tests.trtllm.rules_kv import blocks_for

DRAFTS_GIVE_WAY = "drafts-give-way"
CONTEXTS_BEFORE_DRAFTS = "contexts-before-drafts"
BLOCKS_BY_CHUNK = "context-blocks-by-chunk"
ROOM_FOR_THE_FIRST_TOKEN = "room-for-the-first-token"
NOBODY_IS_PAUSED_FOR_DRAFTS = "nobody-is-paused-for-drafts"
ONE_TOKEN_LEFT = "one-token-left-is-a-generation"
NEWCOMERS_IN_LINE = "newcomers-stay-in-line"
SMALLER_UNIT = "the-unit-fits-with-a-full-batch"
OURS = frozenset(
    (
        *(DRAFTS_GIVE_WAY, CONTEXTS_BEFORE_DRAFTS, BLOCKS_BY_CHUNK, ROOM_FOR_THE_FIRST_TOKEN),
        *(NOBODY_IS_PAUSED_FOR_DRAFTS, ONE_TOKEN_LEFT, NEWCOMERS_IN_LINE, SMALLER_UNIT),
    )
)
"""The differences that a single step without EQUAL_PROGRESS and STATIC_BATCH can show."""


def ours(vector: Vector) -> Schedule:
    """Our own rules decide."""
    return _Step(vector).run()


def our_unit(limits: VectorLimits) -> int:
    """Rows of a chunk: the-unit-fits-with-a-full-batch."""
    return max(1, min(limits.chunk_unit_size, limits.max_num_tokens - limits.max_batch_size + 1))


def reasons(vector: Vector, theirs: Schedule) -> frozenset[str]:
    """The differences that can show in this state; where there is none, both schedule the same."""
    limits, size, everyone = vector.limits, vector.limits.tokens_per_block, _everyone(vector)
    grows = limits.capacity == "MAX_UTILIZATION"
    unit = our_unit(limits)
    generations = [one for one in everyone if one.is_generation]
    contexts = [one for one in everyone if one.position > 0]
    newcomers = [one for one in everyone if not one.has_begun]
    wanted = sum(1 + one.drafts for one in generations)
    left = limits.max_num_tokens - len(generations)
    first = contexts or newcomers[: limits.max_batch_size - len(generations)]
    first_rows = first[0].remaining if first else 0
    reserve = min(first_rows, unit, left) if limits.chunking else first_rows * (first_rows <= left)
    drafts = any(one.drafts for one in generations)
    joined = [one.name in theirs.context for one in newcomers]
    # With TensorRT-LLM a context that has begun holds the blocks of its whole prompt.
    free = limits.num_blocks - sum(blocks_for(one.prompt, size) for one in contexts)
    for one in generations:
        free -= blocks_for(min(one.prompt + one.generated + one.drafts, one.total), size)
    shows = {
        DRAFTS_GIVE_WAY: wanted > limits.max_num_tokens,
        CONTEXTS_BEFORE_DRAFTS: drafts and reserve > 0 and wanted + reserve > limits.max_num_tokens,
        BLOCKS_BY_CHUNK: grows and bool(contexts),
        ROOM_FOR_THE_FIRST_TOKEN: grows and any(one.prompt % size == 0 for one in newcomers),
        NOBODY_IS_PAUSED_FOR_DRAFTS: grows and drafts and free < 0,
        ONE_TOKEN_LEFT: any(one.remaining == 1 for one in contexts),
        NEWCOMERS_IN_LINE: joined != sorted(joined, reverse=True),
        SMALLER_UNIT: limits.chunking is not None and unit < limits.chunk_unit_size,
    }
    return frozenset(name for name, can_show in shows.items() if can_show)


@dataclass
class _One:
    """A request of the step. held: its blocks."""

    name: str
    prompt: int
    total: int
    generated: int
    drafts: int
    position: int
    held: int = 0

    @property
    def is_generation(self) -> bool:
        return self.generated > 0

    @property
    def has_begun(self) -> bool:
        return self.is_generation or self.position > 0

    @property
    def remaining(self) -> int:
        return self.prompt - self.position


def _everyone(vector: Vector) -> list[_One]:
    return [
        _One(
            str(place),
            r.prompt,
            min(r.prompt + r.max_tokens, vector.limits.max_seq_len),
            r.generated,
            r.drafts,
            r.position,
        )
        for place, r in enumerate(vector.requests)
    ]


class _Step:
    def __init__(self, vector: Vector) -> None:
        self.limits = limits = vector.limits
        self.size = limits.tokens_per_block
        self.unit = our_unit(limits)
        self.everyone = _everyone(vector)
        self.free = limits.num_blocks
        for one in self.everyone:
            # context-blocks-by-chunk
            self.hold(one, one.prompt + one.generated - 1 if one.is_generation else one.position)
        self.context: dict[str, int] = {}
        self.generation: dict[str, int] = {}
        self.paused: list[str] = []

    def hold(self, one: _One, num_tokens: int) -> bool:
        more = max(0, blocks_for(num_tokens, self.size) - one.held)
        if more > self.free:
            return False
        self.free -= more
        one.held += more
        return True

    def chunk(self, one: _One, num_rows: int) -> int:
        if one.remaining <= num_rows:
            return one.remaining
        return 0 if self.limits.chunking is None else num_rows // self.unit * self.unit

    def run(self) -> Schedule:
        limits = self.limits
        self.running = [one for one in self.everyone if one.has_begun]
        waiting = [one for one in self.everyone if not one.has_begun]
        decoding = [one for one in self.running if self.decodes(one)]
        contexts = [one for one in self.running if not self.decodes(one)]
        left = limits.max_num_tokens - len(decoding)
        first = contexts or (waiting[:1] if len(self.running) < limits.max_batch_size else [])
        shares = self.shares(decoding, left - self.reserve(first, left))
        left -= sum(shares.values())
        order = list(self.running)
        for one in order:
            if one in self.running:
                left -= self.place(one, left)
        for one in self.running:  # drafts take blocks when everybody has those of the step
            if shares.get(one.name) and self.hold(one, self.tokens(one) + shares[one.name]):
                self.generation[one.name] = shares[one.name]
        if not self.paused:
            self.admit(waiting)
        return Schedule(self.context, self.generation, tuple(sorted(self.paused)))

    def decodes(self, one: _One) -> bool:
        return one.is_generation or one.remaining == 1  # one-token-left-is-a-generation

    def tokens(self, one: _One) -> int:
        return one.prompt + one.generated

    def reserve(self, contexts: list[_One], left: int) -> int:
        """contexts-before-drafts: for the first, whether or not there are blocks for it."""
        if not contexts:
            return 0
        if self.limits.chunking is None:
            return contexts[0].remaining if contexts[0].remaining <= left else 0
        return min(contexts[0].remaining, self.unit, left)

    def shares(self, decoding: list[_One], left: int) -> dict[str, int]:
        """drafts-give-way: first come first served, and no more than are left."""
        shares = {}
        for one in decoding:
            shares[one.name] = min(one.drafts, left)
            left -= shares[one.name]
        return shares

    def place(self, one: _One, left: int) -> int:
        """Blocks for a running request; the last one gives its own back as often as it takes -> rows of a context."""
        size = 1 if self.decodes(one) else self.chunk(one, left)
        if not size:
            return 0
        end = self.tokens(one) if one.is_generation else one.position + size  # context-blocks-by-chunk
        while not self.hold(one, end):
            victim = self.running.pop()
            self.free += victim.held
            victim.held = 0
            self.paused.append(victim.name)
            if victim is one:
                return 0
        if one.is_generation:
            self.generation[one.name] = 0  # nobody-is-paused-for-drafts
        else:
            self.context[one.name] = size
        return 0 if self.decodes(one) else size

    def admit(self, waiting: list[_One]) -> None:
        limits = self.limits
        left = limits.max_num_tokens - sum(self.context.values()) - sum(1 + d for d in self.generation.values())
        starting = [one for one in self.running if not self.decodes(one)]
        for one in waiting:
            if len(self.running) == limits.max_batch_size or left <= 0 or not self.fits(one, starting):
                break
            size = self.chunk(one, left)
            if not size or not self.hold(one, size):
                break  # newcomers-stay-in-line
            left -= size
            self.context[one.name] = size
            self.running.append(one)
            starting.append(one)

    def fits(self, one: _One, starting: list[_One]) -> bool:
        if self.limits.capacity == "GUARANTEED_NO_EVICT":
            reserved = sum(blocks_for(other.total, self.size) - other.held for other in self.running)
            return blocks_for(one.total, self.size) <= self.free - reserved
        reserved = sum(blocks_for(other.prompt + 1, self.size) - other.held for other in starting)
        return blocks_for(one.prompt + 1, self.size) <= self.free - reserved  # room-for-the-first-token
