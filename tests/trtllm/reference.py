"""One scheduling step by TensorRT-LLM's rules, and by ours: the same rules with the documented differences switched on.

Written from the public source of its schedulers, in our own words:

*Blocks.* A generation holds the blocks of all tokens but its last, which this step computes. A context that has begun
holds those of its whole prompt.

*Capacity, GUARANTEED_NO_EVICT.* Every running generation is in, and keeps the blocks of its longest end. Then contexts,
in order: each must find the blocks of its longest end, less what it holds; the first that does not ends the line.

*Capacity, MAX_UTILIZATION.* In order, each needs the blocks of this step only: a generation those of its token and its
drafts, a newcomer those of its prompt, a context that has begun none. Where one does not fit, the last request that has
begun, from here on, gives its blocks back and waits, and the line ends before it; then the same request is tried again.
If none behind has begun, the line ends here.

*Rows.* In order: a generation costs one row and its drafts, and ends the line if that is too much. Without chunks a
context costs its prompt, and ends the line, too. With chunks contexts share what generations leave, first come first
served; a chunk that is not the last of its prompt is a multiple of the unit, and may be nothing, while a smaller prompt
behind it still gets its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.trtllm.check.vectors import Schedule, Vector, VectorLimits

DRAFTS_GIVE_WAY = "drafts-give-way"
CONTEXTS_BEFORE_DRAFTS = "contexts-before-drafts"
BLOCKS_BY_CHUNK = "context-blocks-by-chunk"
ROOM_FOR_THE_FIRST_TOKEN = "room-for-the-first-token"
NOBODY_IS_PAUSED_FOR_DRAFTS = "nobody-is-paused-for-drafts"
ONE_TOKEN_LEFT = "one-token-left-is-a-generation"
NEWCOMERS_IN_LINE = "newcomers-stay-in-line"
SMALLER_UNIT = "the-unit-fits-beside-a-full-batch"
OURS = frozenset(
    (
        *(DRAFTS_GIVE_WAY, CONTEXTS_BEFORE_DRAFTS, BLOCKS_BY_CHUNK, ROOM_FOR_THE_FIRST_TOKEN),
        *(NOBODY_IS_PAUSED_FOR_DRAFTS, ONE_TOKEN_LEFT, NEWCOMERS_IN_LINE, SMALLER_UNIT),
    )
)
"""The differences that a single step without EQUAL_PROGRESS and STATIC_BATCH can show."""


def theirs(vector: Vector) -> Schedule:
    """By TensorRT-LLM's rules: first by blocks, then by rows."""
    return _Theirs(vector).run()


def ours(vector: Vector) -> Schedule:
    """By the same rules with OURS, which are about one pass over the requests."""
    return _Ours(vector).run()


def our_unit(limits: VectorLimits) -> int:
    """Of chunks: the-unit-fits-beside-a-full-batch."""
    return max(1, min(limits.chunk_unit_size, limits.max_num_tokens - limits.max_batch_size + 1))


def reasons(vector: Vector) -> frozenset[str]:
    """The differences that can show in this state; where there is none, both schedule the same."""
    step, limits = _Theirs(vector), vector.limits
    admitted = step.run().context
    grows = limits.capacity == "MAX_UTILIZATION"
    unit = our_unit(limits)
    generations = [one for one in step.everyone if one.is_generation]
    contexts = [one for one in step.everyone if one.position > 0]
    newcomers = [one for one in step.everyone if not one.has_begun]
    wanted = sum(1 + one.drafts for one in generations)
    left = limits.max_num_tokens - len(generations)
    first = contexts or newcomers[: limits.max_batch_size - len(generations)]
    first_rows = first[0].remaining if first else 0
    reserve = min(first_rows, unit, left) if limits.chunking else first_rows * (first_rows <= left)
    drafts = any(one.drafts for one in generations)
    joined = [one.name in admitted for one in newcomers]
    shows = {
        DRAFTS_GIVE_WAY: wanted > limits.max_num_tokens,
        CONTEXTS_BEFORE_DRAFTS: drafts and reserve > 0 and wanted + reserve > limits.max_num_tokens,
        BLOCKS_BY_CHUNK: grows and bool(contexts),
        ROOM_FOR_THE_FIRST_TOKEN: grows and any(one.prompt % step.size == 0 for one in newcomers),
        NOBODY_IS_PAUSED_FOR_DRAFTS: grows and drafts and sum(map(step.needed, generations)) > step.free,
        ONE_TOKEN_LEFT: any(one.remaining == 1 for one in contexts),
        NEWCOMERS_IN_LINE: joined != sorted(joined, reverse=True),
        SMALLER_UNIT: limits.chunking is not None and unit < limits.chunk_unit_size,
    }
    return frozenset(name for name, can_show in shows.items() if can_show)


def blocks_for(num_tokens: int, size: int) -> int:
    return -(-num_tokens // size)


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


class _Step:
    is_ours = False

    def __init__(self, vector: Vector) -> None:
        self.limits = limits = vector.limits
        self.size = limits.tokens_per_block
        self.unit = our_unit(limits) if self.is_ours else limits.chunk_unit_size
        self.everyone = [
            _One(
                str(place),
                r.prompt,
                min(r.prompt + r.max_tokens, limits.max_seq_len),
                r.generated,
                r.drafts,
                r.position,
            )
            for place, r in enumerate(vector.requests)
        ]
        self.free = limits.num_blocks
        for one in self.everyone:
            self.hold(one, one.prompt + one.generated - 1 if one.is_generation else self.begun(one))
        self.context: dict[str, int] = {}
        self.generation: dict[str, int] = {}
        self.paused: list[str] = []

    def begun(self, one: _One) -> int:
        """Tokens whose blocks a context holds that may have begun: context-blocks-by-chunk."""
        return one.position if self.is_ours else one.prompt * (one.position > 0)

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

    def result(self) -> Schedule:
        return Schedule(self.context, self.generation, tuple(sorted(self.paused)))


class _Theirs(_Step):
    """The rules as they are."""

    def run(self) -> Schedule:
        no_evict = self.limits.capacity == "GUARANTEED_NO_EVICT"
        self.choose_rows(self.by_longest_end() if no_evict else self.by_this_step())
        return self.result()

    def by_longest_end(self) -> list[_One]:
        generations = [one for one in self.everyone if one.is_generation]
        available = self.free - sum(blocks_for(one.total, self.size) - one.held for one in generations)
        fitting = generations[: self.limits.max_batch_size]
        for one in self.everyone:
            if one.is_generation:
                continue
            needed = blocks_for(one.total, self.size) - one.held
            if needed > available or len(fitting) == self.limits.max_batch_size:
                break
            available -= needed
            fitting.append(one)
        return fitting

    def by_this_step(self) -> list[_One]:
        fitting: list[_One] = []
        free, line = self.free, list(self.everyone)
        while len(fitting) < len(line):
            one = line[len(fitting)]
            needed = self.needed(one)
            if needed <= free and len(fitting) < self.limits.max_batch_size:
                free -= needed
                fitting.append(one)
                continue
            begun = [place for place in range(len(fitting), len(line)) if line[place].has_begun]
            if not begun:
                break
            victim = line[begun[-1]]
            free += victim.held
            self.paused.append(victim.name)
            del line[begun[-1] :]
        return fitting

    def needed(self, one: _One) -> int:
        if one.is_generation:
            tokens = one.prompt + one.generated - 1
            return blocks_for(min(tokens + 1 + one.drafts, one.total), self.size) - blocks_for(tokens, self.size)
        return 0 if one.has_begun else blocks_for(one.prompt, self.size)

    def choose_rows(self, fitting: list[_One]) -> None:
        left = self.limits.max_num_tokens
        chunked: list[_One] = []
        for one in fitting:
            if one.is_generation:
                if 1 + one.drafts > left:
                    break
                self.generation[one.name] = one.drafts
                left -= 1 + one.drafts
            elif self.limits.chunking is None:
                if one.remaining > left:
                    break
                self.context[one.name] = one.remaining
                left -= one.remaining
            else:
                chunked.append(one)
        for one in chunked:
            size = self.chunk(one, left)
            left -= size
            if size:
                self.context[one.name] = size


class _Ours(_Step):
    is_ours = True

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
        return self.result()

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
