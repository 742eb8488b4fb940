"""A client's request, from its frame to its final response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from faser_trtllm.core.plan import OutputEnd, RequestOutput
from faser_trtllm.core.request import FinishReason
from faser_trtllm.errors import CancelledError, FaserError
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.model import ServedModel
from faser_trtllm.serving.engine_process.wire import RequestFrame
from faser_trtllm.serving.text.request import TextOutput
from faser_trtllm.serving.text.stream import PreparedText, TextStream
from faser_trtllm.serving.triton.reply import output_tensors
from faser_trtllm.serving.triton.request import Part

if TYPE_CHECKING:
    from faser_trtllm.serving.engine_process.outbox import Outbox


class OpenRequest(TextStream):
    """One sequence of a client's request: the executor's sink for its tokens, and the builder of its responses.

    The executor's thread calls it. Any thread may fail, cancel and stop it; the rest runs under the outbox's lock.

    siblings: all sequences of the client's request, including this one; empty once the final response was made. The
        Triton backend forgets the request with that response, so nothing may follow it.
    is_urgent: the next output must not wait for the writer's rest.
    num_put, num_converted, num_due_bytes: the outbox's counts of outputs received and detokenized, and of bytes due.
    """

    def __init__(
        self,
        prepared: PreparedText,
        part: Part,
        frame: RequestFrame,
        model: ServedModel,
        siblings: list[OpenRequest],
        outbox: Outbox,
        on_end: Callable[[int], None],
    ) -> None:
        """on_end: called with the handle once the final response was made."""
        super().__init__(prepared)
        self.handle = frame.handle
        self.client_id = frame.client_id
        self.id = f"{frame.handle}.{len(siblings)}"  # the executor's request id
        self.model = model
        self.siblings = siblings
        self.is_urgent = True
        self.num_put = self.num_converted = self.num_due_bytes = 0
        self._part = part
        self._outputs = wire.output_names(frame.outputs)
        self._outbox = outbox
        self._on_end = on_end
        self._is_cancelled = self._is_stopped = self._is_ended = False

    def __call__(self, output: RequestOutput) -> bool | OutputEnd:
        """Take a step's tokens, as the executor's sink; return True or an OutputEnd if the request has ended."""
        return (self.is_done or self._outbox.put(self, output)) and (self.output_end or True)

    def fail(self, error: FaserError) -> None:
        """End the client's request with an error, after its outputs so far."""
        self._outbox.fail(self, error)

    def cancel(self) -> None:
        """Cancel for the client, which gets no more output, only the final response."""
        self._is_cancelled = True
        self.model.cancel(self.id)

    def stop(self) -> None:
        """End the request with its output so far; this is not an error."""
        self._is_stopped = True
        self.model.cancel(self.id)

    def responses(self) -> list[bytes]:
        """Return the responses (wire.py) for all output that is due."""
        output = self.take()
        error = self._error_of(output)
        if output.is_final:
            self.model.metrics.ended(output.finish_reason if error is None else None, error)
        if not self.siblings:
            return []
        if error is not None:
            before = replace(output, finish_reason=None, statistics=None)
            has_output = self.prepared.request.stream and not self._is_cancelled and (output.token_ids or output.text)
            return [*([self._response(before, is_final=False)] if has_output else []), self.refuse(error)]
        if self._is_cancelled:
            return []
        self._is_ended |= output.is_final
        is_last = all(sibling._is_ended for sibling in self.siblings)
        response = self._response(output, is_last)
        if is_last:
            self._close()
        return [response]

    def refuse(self, error: FaserError) -> bytes:
        """Return the final response of a client's request that fails, and end its other sequences."""
        for sibling in self.siblings:
            sibling.model.cancel(sibling.id)
        self._close()
        return wire.error_response(self.handle, error, self.model.contract.names)

    def _close(self) -> None:
        self.siblings.clear()
        self._on_end(self.handle)

    def _error_of(self, output: TextOutput) -> FaserError | None:
        """Return the error that the client gets, if any; a timeout after the first token is not an error."""
        reason = output.finish_reason
        is_cancelled = self._is_cancelled or (reason == FinishReason.CANCELLED.value and not self._is_stopped)
        if is_cancelled and output.is_final:
            return CancelledError("the request was cancelled")
        if reason == FinishReason.TIMEOUT.value and output.statistics and output.statistics.num_output_tokens:
            return None
        return output.error

    def _response(self, output: TextOutput, is_final: bool) -> bytes:
        tensors = output_tensors(self.model.contract, self._part, output, self.taken_log_probs, self.cum_log_prob)
        outputs = [wire.output_tensor(name, array) for name, array in tensors.items() if name in self._outputs]
        return wire.response(self.handle, outputs, is_final)
