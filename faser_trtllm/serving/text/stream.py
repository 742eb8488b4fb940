"""Turns the executor's tokens of one request into text outputs."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_trtllm.core.plan import OutputEnd, RequestOutput
from faser_trtllm.core.request import FinishReason, Request, RequestStats, Top
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import CancelledError, FaserError, timed_out
from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from faser_trtllm.serving.text.acceptance import Acceptance, AcceptanceLog
from faser_trtllm.serving.text.request import ContextLogProbs, Statistics, TextOutput, TextRequest, TopLogProbs
from faser_trtllm.serving.text.stop_words import StopWords
from faser_trtllm.serving.text.stopping import StoppingText, StoppingTokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A text request that was checked and tokenized."""

    request: TextRequest
    prompt: Sequence[int]
    params: SamplingParams
    stop_words: StopWords | None  # of texts, or of token_text() if the request has no text
    tokenizer: Tokenizer
    tokens_per_block: int  # of the engine's KV cache
    stream_interval: int = 1  # steps between two outputs of a stream; the first and the last are due at once
    spelled_words: StopWords | None = None  # stop words with special tokens, if the text leaves those out

    @property
    def prompt_text(self) -> str:
        return self.request.text if self.request.text is not None else self.tokenizer.decode(self.prompt)


class TextStream:
    """The output of a request: push() adds tokens, take() returns the text that they added since the last take().

    One thread at a time may call it.

    is_due: take() has an output to return.
    is_done: the stream takes no more tokens, since a stop word was found or detokenizing failed.
    may_stop: the text may end the request.
    needs_stats: push() reads the statistics of every step, not only of the last.
    num_bytes: estimated memory of the output not taken yet.
    taken_log_probs, cum_log_prob: fp32 log probs of all tokens taken, and their sum.
    output_end: the counts that apply once a stop word has ended the request.
    """

    def __init__(self, prepared: PreparedText) -> None:
        request = prepared.request
        self.prepared = prepared
        self.is_due = self.is_done = False
        self.may_stop = prepared.stop_words is not None
        self._acceptance = AcceptanceLog() if request.return_acceptance else None
        self.needs_stats = self.may_stop or request.return_statistics or request.return_is_draft
        self.needs_stats |= request.return_acceptance
        self.num_bytes = 0
        self.taken_log_probs = array("f")
        self.cum_log_prob = 0.0
        self._stopping: StoppingText | StoppingTokens
        if request.detokenize:
            detokenizer = IncrementalDetokenizer(
                prepared.tokenizer, skip_special_tokens=request.skip_special_tokens, before=prepared.prompt
            )
            self._stopping = StoppingText(
                detokenizer,
                prepared.stop_words,
                request.min_tokens,
                prepared.spelled_words,
                prepared.tokenizer.special_tokens,
            )
        else:
            self._stopping = StoppingTokens(prepared.stop_words, request.min_tokens)
        self._pieces: list[str] = []
        self._token_ids = array("i")
        self._num_steps_held = prepared.stream_interval
        self._num_output_tokens = 0
        self._num_sent_tokens = 0
        self._num_pushed_tokens = 0  # including tokens held for a possible stop word
        self._lacks_context = request.return_context_log_probs
        self._is_draft: list[bool] = []
        self.output_end: OutputEnd | None = None
        self._counted = (0, 0)  # settled and accepted drafts, as of the latest push()
        self._reason: FinishReason | None = None
        self._error: FaserError | None = None
        self._progress: tuple[Request, RequestStats] | None = None  # as of the latest push()

    def push(self, output: RequestOutput, stats: RequestStats) -> bool:
        """Add the tokens of a step; return True if a stop word or an error in detokenizing ends the request here.

        stats: the request's statistics when the output was committed.
        """
        if self.is_done:
            return True
        try:
            self._push(output, stats)
        except Exception as error:
            log.exception("the output of a request could not be detokenized; the request ends")
            self.end(FaserError(f"the output could not be detokenized: {type(error).__name__}; see the server's log"))
        return self.is_done

    def end(self, error: FaserError, *, drop: bool = False) -> None:
        """End the request with an error, or as cancelled; do nothing if it has ended.

        With `drop`, discard the output not taken yet, even if it includes the request's end.
        """
        if self._reason is not None and not drop:
            return
        self._reason = FinishReason.CANCELLED if isinstance(error, CancelledError) else FinishReason.ERROR
        self._error = error
        if drop or not self.prepared.request.stream:
            self._pieces, self._token_ids, self.num_bytes = [], array("i"), 0
        self._num_output_tokens = self._num_sent_tokens + len(self._token_ids)
        self.is_due = self.is_done = True

    @property
    def has_end(self) -> bool:
        """True if the next output is the last."""
        return self._reason is not None

    def take(self) -> TextOutput:
        """Return the output added since the last call; the last output has a finish reason."""
        request, error = self.prepared.request, self._error
        text, token_ids = "".join(self._pieces), tuple(self._token_ids)
        is_draft = tuple(self._is_draft[self._num_sent_tokens : self._num_output_tokens])
        kept = self._take_kept_rows()
        self._pieces, self._token_ids, self.num_bytes = [], array("i"), 0
        self.is_due, self._num_steps_held = False, 0
        if self._reason is None:
            statistics = self._statistics() if request.return_statistics else None
            return TextOutput(text, token_ids, statistics=statistics, is_draft=is_draft, **kept)
        repeats_prompt = request.detokenize and not request.stream and not request.exclude_input_in_output
        return TextOutput(
            self.prepared.prompt_text + text if repeats_prompt and error is None else text,
            token_ids,
            finish_reason=self._reason.value,
            statistics=self._statistics(),
            error=self._error_of_end(),
            is_draft=is_draft,
            acceptance=self._acceptance_so_far(),
            **kept,
        )

    def _push(self, output: RequestOutput, stats: RequestStats) -> None:
        request = self.prepared.request
        num_new = len(output.new_token_ids)
        self._progress = output.request, stats
        num_before, self._num_pushed_tokens = self._num_pushed_tokens, self._num_pushed_tokens + num_new
        before, self._counted = self._counted, (stats.num_settled_drafts, stats.num_accepted_tokens)
        num_accepted = self._counted[1] - before[1]
        if request.return_is_draft:  # a step's first tokens are its accepted drafts
            num_drafts = min(num_accepted, num_new)
            self._is_draft += [True] * num_drafts + [False] * (num_new - num_drafts)
        stopped = self._stopping.push(output.new_token_ids)
        reason = output.finish_reason
        if reason is not None and not stopped:
            stopped = self._stopping.finish()
        if stopped:
            num_tokens = self._stopping.num_tokens
            place = num_tokens - num_before  # index in the step, from 1, of the token that completed the stop word
            num_drafted = before[0] + place if place <= num_accepted else self._counted[0]
            self.output_end = OutputEnd(num_tokens, num_drafted, before[1] + min(num_accepted, max(0, place - 1)))
        text, token_ids = self._stopping.take()
        if self._acceptance is not None:
            end = self._num_output_tokens + len(token_ids) if stopped else self._num_pushed_tokens
            self._acceptance.add(stats, max(0, end - num_before), self.output_end)
        if text:
            self._pieces.append(text)
        self._token_ids.extend(token_ids)
        self._num_output_tokens += len(token_ids)
        self._num_steps_held += 1
        self.num_bytes += 4 * len(text) + 36 * len(token_ids)  # Python's sizes: 4 bytes per character, 36 per int
        if output.request.keeps_rows and num_new:
            self.num_bytes += num_new * _row_bytes(output.request)
        if stopped or reason is not None:
            self._reason = FinishReason.STOP if stopped or reason is None else reason
            self.is_due, self.is_done = True, stopped
        elif request.stream and self._num_steps_held >= self.prepared.stream_interval:
            self.is_due = bool(self._pieces or (self._token_ids and not request.detokenize))

    def _take_kept_rows(self) -> dict[str, Any]:
        """Return log probs and logits of the tokens taken now, and once those of the prompt, by field of TextOutput."""
        first, end = self._num_sent_tokens, self._num_output_tokens
        self._num_sent_tokens = end
        if self._progress is None:
            return {}
        request, _ = self._progress
        kept: dict[str, Any] = {}
        if request.keeps_rows:
            kept["log_probs"] = tuple(request.output_log_probs[first:end])
            self.taken_log_probs.extend(kept["log_probs"])
            self.cum_log_prob = sum(kept["log_probs"], self.cum_log_prob)
            kept["tops"] = _tops(request.output_tops[first:end])
            kept["logits"] = b"".join(row.data for row in request.output_logits[first:end])
        if self._lacks_context and not request.lacks_context_log_probs:
            self._lacks_context = False
            prompt: list[int] = request.tokens[: request.prompt_len].tolist()
            tops = _tops(request.context_tops)
            kept["context"] = ContextLogProbs(tuple(prompt), tuple(request.context_log_probs), tops)
        return kept

    def _acceptance_so_far(self) -> Acceptance | None:
        if self._acceptance is None or self._progress is None:
            return None
        return self._acceptance.result(self._progress[0].max_draft_len)

    def _statistics(self) -> Statistics:
        if self._progress is None:  # the request ended before it reached the executor
            return Statistics(len(self.prepared.prompt), 0, 0, 0, 0, 0, 0)
        (request, stats), end = self._progress, self.output_end
        block = self.prepared.tokens_per_block

        def in_ns(time_s: float | None) -> int | None:
            return None if time_s is None else round(1e9 * time_s)

        num_tokens = request.prompt_len + self._num_pushed_tokens  # the executor may have truncated request.tokens
        num_blocks = -(-num_tokens // block) if stats.num_steps else 0
        num_reused_blocks = stats.num_cached_tokens // block
        return Statistics(
            num_input_tokens=request.prompt_len,
            num_output_tokens=self._num_output_tokens,
            num_draft_tokens=stats.num_draft_tokens if end is None else end.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens if end is None else end.num_accepted_tokens,
            num_pruned_rows=stats.num_pruned_rows,
            num_cached_tokens=stats.num_cached_tokens,
            num_steps=stats.num_steps,
            num_reused_blocks=num_reused_blocks,
            num_new_blocks=max(0, num_blocks - num_reused_blocks),
            arrival_time_ns=round(1e9 * request.arrival_s),
            first_scheduled_time_ns=in_ns(stats.first_scheduled_s),
            first_token_time_ns=in_ns(stats.first_token_s),
            last_token_time_ns=in_ns(stats.last_token_s),
            num_predicted=stats.num_predicted,
            num_mispredicted=stats.num_mispredicted,
            is_synthetic=stats.is_synthetic,
        )

    def _error_of_end(self) -> FaserError | None:
        if self._error is not None or self._progress is None:
            return None if self._reason is FinishReason.CANCELLED else self._error
        request, stats = self._progress
        if self._reason is FinishReason.ERROR:
            return FaserError(request.error or "the engine failed on this request; send it again")
        if self._reason is FinishReason.TIMEOUT:
            where = "in the queue" if stats.first_scheduled_s is None else "while it ran"
            return timed_out(where, self.prepared.request.timeout_ms)
        return None


def _row_bytes(request: Request) -> int:
    """Estimate the bytes of a token's kept log prob, most probable tokens and logits."""
    arrays = [*request.output_logits[:1], *(array for top in request.output_tops[:1] for array in top)]
    return 36 + sum(array.nbytes for array in arrays)


def _tops(tops: Sequence[Top]) -> TopLogProbs:
    return TopLogProbs(
        b"".join(ids.tobytes() for ids, _ in tops), b"".join(logs.astype(np.float32).tobytes() for _, logs in tops)
    )
