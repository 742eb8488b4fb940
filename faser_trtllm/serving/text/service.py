"""Text generation over an executor: tokenizes, detokenizes step by step, and finds stop words.

Knows nothing of sockets: the engine child serves it, and `faser generate` calls it in process.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from faser_trtllm.core.guide import Guide
from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason, Request, RequestStats, Top
from faser_trtllm.core.sampling_params import SamplingParams, check_token_ids
from faser_trtllm.errors import CancelledError, FaserError, InvalidArgumentError
from faser_trtllm.guided.compiler import GuideCompiler
from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from faser_trtllm.serving.text.backlog import Backlog
from faser_trtllm.serving.text.guide_queue import GuideQueue
from faser_trtllm.serving.text.length_check import LengthCheck
from faser_trtllm.serving.text.request import (
    MAX_LOGITS_BYTES,
    ContextLogProbs,
    Statistics,
    TextOutput,
    TextRequest,
    TopLogProbs,
)
from faser_trtllm.serving.text.stopping import StoppingText, StoppingTokens

log = logging.getLogger(__name__)

OnOutput = Callable[[TextOutput], None]


class TokenExecutor(Protocol):
    """The part of executor.executor.Executor that text generation uses."""

    vocab_size: int
    max_seq_len: int
    tokens_per_block: int

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sink: Callable[[RequestOutput], bool],
        *,
        priority: float = 0.5,
        timeout_s: float | None = None,
    ) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class TextGenerator:
    """Serves text requests. Thread-safe, like the executor."""

    def __init__(
        self, executor: TokenExecutor, tokenizer: Tokenizer, stream_interval: int = 1, backlog: Backlog | None = None
    ) -> None:
        """stream_interval: steps between two outputs of a request; the first and the last output are sent at once.
        backlog: makes the text on the thread that calls its convert(); None: on the executor's."""
        self._executor = executor
        self._stream_interval = stream_interval
        self._backlog = backlog
        self._tokenizer = tokenizer
        self._ids = itertools.count()
        self._length = LengthCheck(tokenizer, executor.max_seq_len)
        self._compiler = GuideCompiler(tokenizer, executor.vocab_size)
        self._guides = GuideQueue(self._compiler)

    def submit(self, request_id: str, request: TextRequest, on_output: OnOutput) -> None:
        """Queue a request. on_output receives its outputs on the thread that makes the text; the last has a
        finish_reason.

        Raises InvalidArgumentError or UnavailableError, and then on_output is never called. If the request's guide has
        to be compiled first, that happens on another thread, and an error found from then on is the only output.
        """
        request.validate()
        prompt = self._prompt(request)
        params = self._params(request)
        text = _TextSink(
            self._output(request, prompt),
            request,
            prompt_text=lambda: request.text if request.text is not None else self._tokenizer.decode(prompt),
            tokens_per_block=self._executor.tokens_per_block,
            stream_interval=self._stream_interval,
            on_output=on_output,
        )
        sink = text if self._backlog is None else self._backlog.sink(text)
        arrived_s = time.monotonic()

        def run(guide: Guide | None) -> None:
            waited_s = 0.0 if guide is None else time.monotonic() - arrived_s
            timeout_s = None if request.timeout_ms is None else max(0.0, request.timeout_ms / 1e3 - waited_s)
            guided = params if guide is None else dataclasses.replace(params, guide=guide)
            self._executor.submit(request_id, prompt, guided, sink, priority=request.priority, timeout_s=timeout_s)

        spec = request.guide()
        if spec is None:
            run(None)
        else:
            self._guides.submit(request_id, spec, run, lambda error: on_output(_end(error, len(prompt))))

    def compile_guide(self, request: TextRequest) -> None:
        """Compile the request's guide, if any, so that submit() need not wait; raises InvalidArgumentError."""
        spec = request.guide()
        if spec is not None:
            self._compiler.compile(spec)

    def cancel(self, request_id: str) -> None:
        """End a request with finish reason "cancelled"; unknown ids are ignored."""
        if not self._guides.cancel(request_id):
            self._executor.cancel(request_id)

    def generate(self, request: TextRequest) -> Iterator[TextOutput]:
        """Yield the outputs of one request; leaving the iteration early cancels it."""
        outputs: queue.SimpleQueue[TextOutput] = queue.SimpleQueue()
        request_id = f"generate-{next(self._ids)}"
        self.submit(request_id, request, outputs.put)
        try:
            while True:
                output = outputs.get()
                yield output
                if output.is_final:
                    return
        finally:
            self.cancel(request_id)

    def _output(self, request: TextRequest, prompt: Sequence[int]) -> StoppingText | StoppingTokens:
        if request.detokenize:
            detokenizer = IncrementalDetokenizer(self._tokenizer, before=prompt)
            return StoppingText(detokenizer, request.stop_words, request.min_tokens)
        check_token_ids("stop_words_list", list(itertools.chain(*request.stop_token_ids)), self._executor.vocab_size)
        return StoppingTokens(request.stop_token_ids, request.min_tokens)

    def _prompt(self, request: TextRequest) -> Sequence[int]:
        if request.token_ids is not None:
            return request.token_ids
        assert request.text is not None
        self._length.check("text_input", request.text)
        return self._tokenizer.encode(request.text)

    def _params(self, request: TextRequest) -> SamplingParams:
        max_tokens, min_tokens = request.max_tokens, request.min_tokens
        if min_tokens <= max_tokens:
            max_tokens, min_tokens = (min(number, self._executor.max_seq_len) for number in (max_tokens, min_tokens))
        num_bytes = 4 * self._executor.vocab_size * max_tokens
        if request.return_generation_logits and num_bytes > MAX_LOGITS_BYTES:
            raise InvalidArgumentError(
                f"return_generation_logits with max_tokens {max_tokens} is {num_bytes} bytes, allowed are "
                f"{MAX_LOGITS_BYTES}; lower max_tokens to {MAX_LOGITS_BYTES // (4 * self._executor.vocab_size)}"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=request.seed,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            bad_words=self._bad_words(request.bad_words) + request.bad_token_ids,
            logit_bias=self._logit_bias(request),
            end_ids=request.end_ids if request.end_ids is not None else tuple(self._tokenizer.eos_token_ids),
            num_draft_tokens=request.num_draft_tokens,
            drafters=None if request.drafters is None else tuple(n.strip() for n in request.drafters.split(",")),
            return_log_probs=request.return_log_probs,
            normalize_log_probs=request.normalize_log_probs,
            return_context_log_probs=request.return_context_log_probs,
            num_top_log_probs=request.num_top_log_probs,
            return_generation_logits=request.return_generation_logits,
        )

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        spellings = itertools.chain.from_iterable((word, f" {word}") for word in words if word)
        ids = (tuple(self._tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return tuple(dict.fromkeys(word for word in ids if word))

    def _logit_bias(self, request: TextRequest) -> tuple[tuple[int, float], ...]:
        bias: dict[int, float] = dict(request.logit_bias)
        for word, weight in zip(request.embedding_bias_words, request.embedding_bias_weights, strict=True):
            for token in self._tokenizer.encode(word, add_special_tokens=False):
                bias[token] = bias.get(token, 0.0) + weight
        return tuple(bias.items())


class _TextSink:
    """Turns the tokens of one request into text outputs: a sink for the executor, or a TextSink for a backlog."""

    def __init__(
        self,
        text: StoppingText | StoppingTokens,
        request: TextRequest,
        *,
        prompt_text: Callable[[], str],
        tokens_per_block: int,
        stream_interval: int,
        on_output: OnOutput,
    ) -> None:
        """prompt_text: called once, at the end of a request whose answer repeats the prompt."""
        self._text = text
        self._stream_interval = self._num_steps_held = stream_interval
        self._stream = request.stream
        self._detokenize = request.detokenize
        self._tokens_per_block = tokens_per_block
        self._timeout_ms = request.timeout_ms
        self._on_output = on_output
        self._prompt_text = prompt_text
        self._repeats_prompt = request.detokenize and not request.stream and not request.exclude_input_in_output
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._num_output_tokens = 0
        self._num_sent_tokens = 0
        self._returns_statistics = request.return_statistics
        self._returns_is_draft = request.return_is_draft
        self._lacks_context = request.return_context_log_probs
        self._is_draft: list[bool] = []
        self._num_accepted_tokens = 0
        self.may_stop = any(request.stop_words) or any(request.stop_token_ids)
        self.needs_stats = self.may_stop or request.return_statistics or request.return_is_draft

    def __call__(self, output: RequestOutput) -> bool:
        return self.take(output, output.request.stats)

    def take(self, output: RequestOutput, stats: RequestStats) -> bool:
        """Add the tokens of a step; True if it ends with a stop word, or cannot be made."""
        try:
            return self._add(output, stats)
        except Exception as error:
            log.exception("the text of a request could not be made; the request ends")
            failure = FaserError(f"the text could not be made: {type(error).__name__}; see the server's log")
            self._on_output(_end(failure, output.request.prompt_len))  # else its client would wait for ever
            return True

    def _add(self, output: RequestOutput, stats: RequestStats) -> bool:
        if self._returns_is_draft:
            self._note_drafts(len(output.new_token_ids), stats.num_accepted_tokens)
        stopped = self._text.push(output.new_token_ids)
        reason = output.finish_reason
        if reason is not None and not stopped:
            stopped = self._text.finish()
        final = stopped or reason is not None
        text, token_ids = self._text.take()
        self._num_output_tokens += len(token_ids)
        self._num_steps_held += 1
        is_due = self._stream and self._num_steps_held >= self._stream_interval
        if not final and not (is_due and (text or (token_ids and not self._detokenize))):
            if text or token_ids:
                self._pieces.append(text)
                self._token_ids += token_ids
            return False
        if self._pieces or self._token_ids:
            text = "".join([*self._pieces, text])
            token_ids = [*self._token_ids, *token_ids]
            self._pieces, self._token_ids = [], []
        self._num_steps_held = 0
        is_draft = tuple(self._is_draft[self._num_sent_tokens : self._num_output_tokens])
        kept = self._kept_rows(output.request)
        if not final:
            statistics = self._statistics(output.request, stats) if self._returns_statistics else None
            self._on_output(TextOutput(text, tuple(token_ids), statistics=statistics, is_draft=is_draft, **kept))
            return False
        reason = FinishReason.STOP if stopped or reason is None else reason
        self._on_output(
            TextOutput(
                self._prompt_text() + text if self._repeats_prompt else text,
                tuple(token_ids),
                finish_reason=reason.value,
                statistics=self._statistics(output.request, stats),
                error=self._error(output, reason),
                is_draft=is_draft,
                **kept,
            )
        )
        return stopped

    def _note_drafts(self, num_new: int, num_accepted: int) -> None:
        """The accepted drafts of a step are the first of its tokens. num_accepted: so far."""
        num_drafts = min(num_accepted - self._num_accepted_tokens, num_new)
        self._num_accepted_tokens = num_accepted
        self._is_draft += [True] * num_drafts + [False] * (num_new - num_drafts)

    def _kept_rows(self, request: Request) -> dict[str, Any]:
        """Log probs and logits of the tokens sent now, and once those of the prompt, as fields of TextOutput."""
        first, end = self._num_sent_tokens, self._num_output_tokens
        self._num_sent_tokens = end
        kept: dict[str, Any] = {}
        if request.keeps_rows:
            kept["log_probs"] = tuple(request.output_log_probs[first:end])
            kept["tops"] = _tops(request.output_tops[first:end])
            kept["logits"] = b"".join(row.tobytes() for row in request.output_logits[first:end])
        if self._lacks_context and not request.lacks_context_log_probs:
            self._lacks_context = False
            prompt: list[int] = request.tokens[: request.prompt_len].tolist()
            tops = _tops(request.context_tops)
            kept["context"] = ContextLogProbs(tuple(prompt), tuple(request.context_log_probs), tops)
        return kept

    def _statistics(self, request: Request, stats: RequestStats) -> Statistics:
        def since_arrival_ms(time_s: float | None) -> float | None:
            return None if time_s is None else round(1e3 * (time_s - request.arrival_s), 3)

        def in_ns(time_s: float | None) -> int | None:
            return None if time_s is None else round(1e9 * time_s)

        num_blocks = -(-stats.num_tokens // self._tokens_per_block) if stats.num_steps else 0
        num_reused_blocks = stats.num_cached_tokens // self._tokens_per_block

        return Statistics(
            num_input_tokens=request.prompt_len,
            num_output_tokens=self._num_output_tokens,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_pruned_rows=stats.num_pruned_rows,
            num_cached_tokens=stats.num_cached_tokens,
            num_steps=stats.num_steps,
            queue_ms=since_arrival_ms(stats.first_scheduled_s),
            ttft_ms=since_arrival_ms(stats.first_token_s),
            total_ms=since_arrival_ms(stats.last_token_s),
            num_reused_blocks=num_reused_blocks,
            num_new_blocks=max(0, num_blocks - num_reused_blocks),
            arrival_time_ns=round(1e9 * request.arrival_s),
            first_scheduled_time_ns=in_ns(stats.first_scheduled_s),
            first_token_time_ns=in_ns(stats.first_token_s),
            last_token_time_ns=in_ns(stats.last_token_s),
            is_synthetic=stats.is_synthetic,
        )

    def _error(self, output: RequestOutput, reason: FinishReason) -> str | None:
        if reason is FinishReason.ERROR:
            return output.request.error or "the engine failed on this request; send it again"
        if reason is FinishReason.TIMEOUT:
            where = "in the queue" if output.request.stats.first_scheduled_s is None else "while it ran"
            limit = f"timeout_ms is {self._timeout_ms:g}"
            return f"the request timed out {where}, {limit}; try again later or raise it"
        return None


def _tops(tops: Sequence[Top]) -> TopLogProbs:
    return TopLogProbs(
        b"".join(ids.tobytes() for ids, _ in tops), b"".join(logs.astype(np.float32).tobytes() for _, logs in tops)
    )


def _end(error: FaserError, num_input_tokens: int) -> TextOutput:
    """The last output of a request that ended before it reached the executor, or whose text cannot be made."""
    reason = FinishReason.CANCELLED if isinstance(error, CancelledError) else FinishReason.ERROR
    message = str(error) if reason is FinishReason.ERROR else None
    statistics = Statistics(
        num_input_tokens=num_input_tokens,
        num_output_tokens=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_pruned_rows=0,
        num_cached_tokens=0,
        num_steps=0,
    )
    return TextOutput(finish_reason=reason.value, statistics=statistics, error=message, error_code=error.code)
