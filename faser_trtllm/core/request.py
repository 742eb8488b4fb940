"""A request and its progress. Only the scheduler writes the fields, and drafting the arrays of pending drafts."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from functools import cached_property
from math import isnan, nan

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.counts import (
    DRAFTERS,
    MAX_DRAFT_LEN,
    MAX_NUM_TOKENS,
    NUM_ACCEPTED,
    NUM_COMPUTED,
    NUM_COUNTS,
    NUM_DRAFT_COMPUTED,
    NUM_DRAFTED,
    NUM_DRAFTS,
    NUM_MISPREDICTED,
    NUM_PREDICTED,
    NUM_PRUNED,
    NUM_STEPS,
    NUM_TOKENS,
)
from faser_trtllm.core.sampling_params import SamplingParams

Top = tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]
"""The most probable tokens at a position and their log probs, best first."""
NO_TOP: Top = (np.empty(0, np.int32), np.empty(0))  # shared, since a tuple of two empty arrays takes 300 bytes

NUM_CANDIDATES = 8  # the draft's best tokens kept per drafted token (faser_cpu.h)


def _count(place: int) -> int:
    """Make a property of a place of `counts`; for the type checker it is an int."""

    def read(self: Request | RequestStats) -> int:
        return self.counts[place]

    def write(self: Request | RequestStats, value: int) -> None:
        self.counts[place] = value

    return property(read, write)  # type: ignore[return-value]


def _time(place: int) -> float | None:
    """Make a property of a place of `times_s`, where nan means None."""

    def read(self: RequestStats) -> float | None:
        time_s: float = self.times_s[place]
        return None if isnan(time_s) else time_s

    def write(self: RequestStats, value: float | None) -> None:
        self.times_s[place] = nan if value is None else value  # type: ignore[call-overload]

    return property(read, write)  # type: ignore[return-value]


def new_counts() -> tuple[memoryview, memoryview]:
    """Return counts [NUM_COUNTS] int32, all 0, and times [2] float64, all nan."""
    return memoryview(array("i", [0] * NUM_COUNTS)), memoryview(array("d", [nan, nan]))


def counts_of(requests: Sequence[Request]) -> npt.NDArray[np.int32]:
    """Return a copy of the requests' counts [num_requests, NUM_COUNTS]."""
    return np.frombuffer(b"".join([request.counts for request in requests]), np.int32).reshape(-1, NUM_COUNTS)


class RequestState(enum.Enum):
    WAITING = "waiting"  # in the queue, no slot, no blocks (also after preemption)
    RUNNING = "running"  # has a slot and blocks
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    STOP = "stop"  # an end id or a stop word
    LENGTH = "length"  # max_tokens, max_seq_len, or no token was allowed
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"  # the request's deadline passed
    ERROR = "error"


class RequestStats:
    """Counts over the life of a request; a draft counts once a pass has verified it or it was dropped."""

    num_tokens = _count(NUM_TOKENS)  # committed, the prompt's included
    num_draft_tokens = _count(NUM_DRAFTED)
    num_accepted_tokens = _count(NUM_ACCEPTED)
    num_pruned_rows = _count(NUM_PRUNED)
    num_steps = _count(NUM_STEPS)  # target passes that committed tokens
    num_predicted = _count(NUM_PREDICTED)  # accepted drafts that came from the request's prediction
    num_mispredicted = _count(NUM_MISPREDICTED)  # predicted drafts that were rejected, or dropped after one that was
    first_token_s = _time(0)
    last_token_s = _time(1)

    def __init__(self, counts: memoryview, times_s: memoryview, is_synthetic: bool = False) -> None:
        """is_synthetic: drafts are accepted by synthetic_acceptance, so the output is not the target's."""
        self.counts, self.times_s = counts, times_s
        self.num_cached_tokens = 0  # prompt tokens found in the KV cache at admission
        self.num_preemptions = 0
        self.first_scheduled_s: float | None = None
        self.is_synthetic = is_synthetic

    @property
    def num_settled_drafts(self) -> int:
        """Drafts that are no longer pending: accepted, rejected, or dropped after one that was rejected."""
        return self.counts[NUM_DRAFTED] - self.counts[NUM_DRAFTS]

    def copy(self) -> RequestStats:
        """Return a snapshot for another thread."""
        counts, times_s = memoryview(array("i", self.counts)), memoryview(array("d", self.times_s))
        copied = RequestStats(counts, times_s, self.is_synthetic)
        copied.num_cached_tokens = self.num_cached_tokens
        copied.num_preemptions = self.num_preemptions
        copied.first_scheduled_s = self.first_scheduled_s
        return copied


class Request:
    """Tokens and counters of one request.

    Arrays of length capacity, which covers max_tokens and the pending drafts, are allocated at their first use, so a
    waiting request holds only its prompt, which several requests may share. While a request has a slot, `counts` and
    the times of its tokens are rows of the scheduler's table, so a step reads and writes all rows at once.

    Attributes:
        tokens: [capacity] int32, num_tokens committed tokens, then num_drafts pending drafts.
        num_computed_tokens: tokens whose target KV is in the cache; in steady decoding num_tokens - 1.
        num_draft_computed_tokens: the same for the draft model; may include pending drafts.
        last_to_draft: maximum number of tokens, pending drafts included, at which a draft is still useful and possible:
            max_num_tokens - 1, or draft_window if that is less.
        counts: [NUM_COUNTS] int32 in the order of core/counts.py; most fields here and in `stats` are elements of it.
        draft_margins: [capacity] fp32, how much logit the draft at a position could lose and still be chosen, at most
            1e4: top-1 minus top-2 of the draft model's edited logits before temperature. For a seeded request,
            temperature x the Gumbel-max lead (lab/reference/draw.py gumbel_lead), which includes the shared noise.
        draft_candidates: [capacity, NUM_CANDIDATES] int32, the best tokens of those logits, best first, -1 where fewer
            are possible; a draft that is not among them comes last. [0, NUM_CANDIDATES] unless keep_candidates, which
            engines with segment boundaries need. Drafting writes it and draft_margins along with the pending tokens.
        draft_runners_up: [capacity] int32, the draft model's second choices; [0] unless keep_runners_up.
        draft_sources: [capacity] int8, the drafter of each draft (native.BY_MODEL, BY_SUFFIX, BY_PREDICTION). A draft
            that is not the model's has its log-odds of acceptance as its margin, and no distribution.
        output_log_probs, output_tops, output_logits ([vocab_size] fp32 each): per output token, if params asks for
            them. The end token that ended the request is not included.
        context_log_probs, context_tops: [prompt_len - 1] the same for prompt tokens from the second on; complete before
            the first output token.
    """

    num_tokens = _count(NUM_TOKENS)
    num_drafts = _count(NUM_DRAFTS)
    num_computed_tokens = _count(NUM_COMPUTED)
    num_draft_computed_tokens = _count(NUM_DRAFT_COMPUTED)

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: npt.ArrayLike,
        params: SamplingParams,
        *,
        max_seq_len: int,
        max_draft_len: int,
        arrival_s: float = 0.0,
        priority: float = 0.5,
        deadline_s: float | None = None,
        draft_window: int | None = None,
        keep_candidates: bool = False,
        keep_runners_up: bool = False,
        is_synthetic: bool = False,
    ) -> None:
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        self.request_id = request_id
        self.params = params
        self.sampling_mode = int(params.mode)
        self.prompt_len = int(prompt.size)
        self.max_num_tokens = min(max_seq_len, self.prompt_len + params.max_tokens)  # committed
        self.max_draft_len = min(
            max_draft_len, params.num_draft_tokens if params.num_draft_tokens is not None else max_draft_len
        )
        self.arrival_s = arrival_s
        self.priority = priority  # 0 to 1, higher runs sooner (TensorRT-LLM: default 0.5)
        self.deadline_s = deadline_s
        self._prompt = prompt
        self._capacity = max(self.max_num_tokens, self.prompt_len) + max_draft_len + 1
        self._keep_candidates, self._keep_runners_up = keep_candidates, keep_runners_up
        self.keeps_rows = params.return_log_probs or params.return_generation_logits
        self.output_log_probs = array("d")  # 8 bytes each; a list takes 32
        self.output_tops: list[Top] = []
        self.context_log_probs = array("d")
        self.context_tops: list[Top] = []
        self.output_logits: list[npt.NDArray[np.float32]] = []
        self.counts, times_s = new_counts()
        self.num_tokens = self.prompt_len
        self.counts[MAX_NUM_TOKENS], self.counts[MAX_DRAFT_LEN] = self.max_num_tokens, self.max_draft_len
        names = native.SOURCES if params.drafters is None else params.drafters
        if self.max_draft_len:
            self.counts[DRAFTERS] = sum(1 << source for name, source in native.SOURCES.items() if name in names)
            if len(params.prediction):
                self.counts[DRAFTERS] |= 1 << native.BY_PREDICTION
        self.last_to_draft = self.max_num_tokens - 1
        if draft_window is not None:
            self.last_to_draft = min(self.last_to_draft, draft_window)
        self.was_drafted = False  # the last step drafted for it without running its rows (ping_pong)
        self.slot = -1
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.stats = RequestStats(self.counts, times_s, is_synthetic)

    @cached_property
    def tokens(self) -> npt.NDArray[np.int32]:
        tokens = np.zeros(self._capacity, np.int32)
        tokens[: self.prompt_len] = self._prompt
        return tokens

    @cached_property
    def draft_margins(self) -> npt.NDArray[np.float32]:
        return np.zeros(self._capacity, np.float32)

    @cached_property
    def draft_candidates(self) -> npt.NDArray[np.int32]:
        return np.full((self._capacity if self._keep_candidates else 0, NUM_CANDIDATES), -1, np.int32)

    @cached_property
    def draft_runners_up(self) -> npt.NDArray[np.int32]:
        return np.full(self._capacity if self._keep_runners_up else 0, -1, np.int32)

    @cached_property
    def draft_sources(self) -> npt.NDArray[np.int8]:
        return np.zeros(self._capacity, np.int8)

    def keep_counts_in(self, counts: memoryview, times_s: memoryview) -> None:
        """Move the counts into these buffers, made as by new_counts."""
        counts[:], times_s[:] = self.counts, self.stats.times_s
        self.counts = self.stats.counts = counts
        self.stats.times_s = times_s

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Only the last committed token lacks target KV, so a pass can verify drafts."""
        return self.num_computed_tokens == self.num_tokens - 1

    @property
    def lacks_context_log_probs(self) -> bool:
        """Logits of prompt rows are still needed, from the end of context_log_probs on."""
        return self.params.return_context_log_probs and len(self.context_log_probs) < self.prompt_len - 1

    @property
    def num_tokens_to_look_up(self) -> int:
        """Number of leading tokens to look up in the KV cache; the last of them is always computed."""
        return len(self.context_log_probs) + 1 if self.lacks_context_log_probs else self.num_tokens

    @property
    def draft_limit(self) -> int:
        """Upper limit on useful pending drafts: a pass commits one token more than it accepts."""
        return max(0, min(self.max_draft_len, self.last_to_draft - self.num_tokens))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, tokens={self.num_tokens}, drafts={self.num_drafts}, "
            f"computed={self.num_computed_tokens}, draft_computed={self.num_draft_computed_tokens}, slot={self.slot})"
        )
