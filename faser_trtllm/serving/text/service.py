"""Text generation with an executor: checks and tokenizes requests, and detokenizes their output.

The engine process uses it for requests from a socket; `faser generate` calls it directly.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from array import array
from collections.abc import Callable, Sequence

from faser_trtllm.core.guide import Guide
from faser_trtllm.core.plan import OutputEnd, RequestOutput
from faser_trtllm.core.sampling_params import MAX_LOGIT_BIAS, SamplingParams, check_count, check_token_ids
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.executor.admission import check_request
from faser_trtllm.executor.executor import Executor, Sink
from faser_trtllm.guided.compiler import COMPILE_TIMEOUT_S, GuideCompiler
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.guide_queue import GuideQueue
from faser_trtllm.serving.text.length_check import LengthCheck
from faser_trtllm.serving.text.request import MAX_LOGITS_BYTES, TextOutput, TextRequest
from faser_trtllm.serving.text.stop_words import StopWords
from faser_trtllm.serving.text.stopping import token_text
from faser_trtllm.serving.text.stream import PreparedText, TextStream
from faser_trtllm.serving.text.word_ids import bad_word_ids, holds_special_tokens, word_ids

OnOutput = Callable[[TextOutput], None]


class TextGenerator:
    """Serves text requests. Thread-safe, like the executor."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        stream_interval: int = 1,
        guide_compile_timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        """stream_interval: steps between two outputs of a request; its first and last are sent at once."""
        self._executor = executor
        self._stream_interval = stream_interval
        self._tokenizer = tokenizer
        self._length = LengthCheck(tokenizer, executor.max_seq_len)
        self._compiler = GuideCompiler(tokenizer, executor.vocab_size, guide_compile_timeout_s)
        self._guides = GuideQueue(self._compiler)

    def prepare(self, request: TextRequest, like: PreparedText | None = None, num_sequences: int = 1) -> PreparedText:
        """Check a request and tokenize its prompt; raise InvalidArgumentError.

        like: a prepared request, whose tokens are reused if the requests differ only in their seeds.
        num_sequences: sequences of the client's request, which share the size limit of logits.
        """
        if like is not None and request == dataclasses.replace(like.request, seed=request.seed):
            params = dataclasses.replace(like.params, seed=request.seed)
            return dataclasses.replace(like, request=request, params=params)
        request.validate()
        vocab_size, max_seq_len = self._executor.vocab_size, self._executor.max_seq_len
        params = self._params(request, num_sequences)
        params.validate(vocab_size)
        check_token_ids("stop_words_list", list(itertools.chain(*request.stop_token_ids)), vocab_size)
        prompt = self._prompt(request)
        check_request(prompt, params, vocab_size=vocab_size, max_seq_len=max_seq_len)
        if request.prediction:
            expected = self._tokenizer.encode(request.prediction, add_special_tokens=False)[:max_seq_len]
            known = itertools.takewhile(lambda token: token < vocab_size, expected)  # the model may have fewer tokens
            params = dataclasses.replace(params, prediction=array("i", known))
        if request.bad_words or request.embedding_bias_words:
            bad_words = (*bad_word_ids(self._tokenizer, request.bad_words), *request.bad_token_ids)
            params = dataclasses.replace(params, bad_words=bad_words, logit_bias=self._logit_bias(request))
            params.validate(vocab_size)
        stop_words = StopWords.of(request.stop_words if request.detokenize else map(token_text, request.stop_token_ids))
        spelled = (word for word in request.stop_words if holds_special_tokens(self._tokenizer, word))
        return PreparedText(
            request,
            array("i", prompt),  # a list takes up to 36 bytes per token
            params,
            stop_words,
            self._tokenizer,
            self._executor.tokens_per_block,
            self._stream_interval,
            StopWords.of(spelled) if request.skip_special_tokens else None,
        )

    def start(
        self,
        request_id: str,
        prepared: PreparedText,
        sink: Sink,
        on_error: Callable[[FaserError], None],
        arrived_s: float | None = None,
    ) -> None:
        """Queue a prepared request; the executor's thread passes its tokens to the sink.

        Raises InvalidArgumentError or UnavailableError, and then calls neither function. If the request's guide must
        first be compiled, another thread does that, and on_error receives any later error.

        arrived_s: when the request arrived, on the executor's clock (time.perf_counter()); None: now. Its times and
        its timeout count from there.
        """
        request, prompt, params = prepared.request, prepared.prompt, prepared.params
        arrived_s = time.perf_counter() if arrived_s is None else arrived_s
        timeout_s = None if request.timeout_ms is None else request.timeout_ms / 1e3

        def run(guide: Guide | None) -> None:
            guided = params if guide is None else dataclasses.replace(params, guide=guide)
            self._executor.submit(
                request_id,
                prompt,
                guided,
                sink,
                priority=request.priority,
                timeout_s=timeout_s,
                arrived_s=arrived_s,
            )

        spec = request.guide()
        if spec is None:
            run(None)
        else:
            self._guides.submit(request_id, spec, run, on_error, request.timeout_ms, request.client_key, arrived_s)

    def submit(self, request_id: str, request: TextRequest, on_output: OnOutput) -> None:
        """Prepare and start a request; raise like prepare() and start().

        on_output receives the outputs on the executor's thread; the last one has a finish_reason.
        """
        stream = TextStream(self.prepare(request))

        def sink(output: RequestOutput) -> bool | OutputEnd:
            stopped = stream.push(output, output.request.stats)
            if stream.is_due:
                on_output(stream.take())
            return stopped and (stream.output_end or True)

        def fail(error: FaserError) -> None:
            stream.end(error)
            on_output(stream.take())

        self.start(request_id, stream.prepared, sink, fail)

    def open_guides(self) -> None:
        """Do the part of the first guide's compilation that no other thread can run next to."""
        self._compiler.open()

    def release_guides(self) -> None:
        """Drop compiled guides that have grown; call it while no request is open."""
        self._compiler.release()

    def compile_guide(self, request: TextRequest) -> None:
        """Compile the request's guide, if any, so that submit() need not wait; raise InvalidArgumentError."""
        spec = request.guide()
        if spec is not None:
            self._compiler.compile(spec)

    def cancel(self, request_id: str) -> None:
        """End a request with finish reason "cancelled"; unknown ids are ignored."""
        if not self._guides.cancel(request_id):
            self._executor.cancel(request_id)

    def _prompt(self, request: TextRequest) -> Sequence[int]:
        if request.token_ids is not None:
            return request.token_ids
        assert request.text is not None
        self._length.check("prompt_tokens", request.text, request.parse_special_tokens)
        return self._tokenizer.encode(
            request.text,
            add_special_tokens=request.add_special_tokens,
            parse_special_tokens=request.parse_special_tokens,
        )

    def _params(self, request: TextRequest, num_sequences: int) -> SamplingParams:
        """Return the sampling parameters, except those that require tokenizing; raise InvalidArgumentError."""
        max_tokens, min_tokens = request.max_tokens, request.min_tokens
        if min_tokens <= max_tokens:
            max_tokens, min_tokens = (min(number, self._executor.max_seq_len) for number in (max_tokens, min_tokens))
        token_bytes = 4 * self._executor.vocab_size * num_sequences
        num_bytes = token_bytes * max_tokens
        if request.return_generation_logits and num_bytes > MAX_LOGITS_BYTES:
            sequences = f" and {num_sequences} sequences" if num_sequences > 1 else ""
            raise InvalidArgumentError(
                f"with max_tokens {max_tokens}{sequences} needs {num_bytes} bytes, allowed are {MAX_LOGITS_BYTES}; "
                f"lower max_tokens to {MAX_LOGITS_BYTES // token_bytes}",
                "return_generation_logits",
                num_bytes,
                MAX_LOGITS_BYTES,
            )
        sampling = request.sampling_fields() | {"max_tokens": max_tokens, "min_tokens": min_tokens}
        return SamplingParams(
            **sampling,
            bad_words=request.bad_token_ids,
            logit_bias=tuple(dict(request.logit_bias).items()),
            end_ids=request.end_ids if request.end_ids is not None else tuple(self._tokenizer.eos_token_ids),
            drafters=None if request.drafters is None else tuple(n.strip() for n in request.drafters.split(",")),
        )

    def _logit_bias(self, request: TextRequest) -> tuple[tuple[int, float], ...]:
        bias: dict[int, float] = dict(request.logit_bias)
        for word, weight in zip(request.embedding_bias_words, request.embedding_bias_weights, strict=True):
            for token in word_ids(self._tokenizer, word):
                bias[token] = bias.get(token, 0.0) + weight
            check_count("logit_bias", len(bias), MAX_LOGIT_BIAS)
        return tuple(bias.items())
