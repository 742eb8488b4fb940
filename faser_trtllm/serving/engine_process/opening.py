"""What an engine process is made of: opening its engines, what it says of an output, and how it dies."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from faser_trtllm.config import ServiceConfig
from faser_trtllm.core.request import FinishReason
from faser_trtllm.executor.stats import Progress, StepWatcher
from faser_trtllm.serving.text.request import TextOutput
from faser_trtllm.serving.text.service import TokenExecutor
from faser_trtllm.serving.worker.messages import Chunk, Failed

log = logging.getLogger("faser.engine")

SHUTTING_DOWN = "the server is shutting down; send the request to another one"

# How long other threads of Python hold up the executor's after each pass, at most; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0001


class ServedExecutor(TokenExecutor, Protocol):
    max_draft_len: int

    def start(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def progress(self) -> Progress: ...
    def watch(self, watcher: StepWatcher) -> None: ...
    def before_pass(self, call: Callable[[], None]) -> None: ...


Opener = Callable[[Path, ServiceConfig], tuple[ServedExecutor, Any]]
"""Opens an engine directory; returns the executor, not yet started, and the tokenizer."""


def message_of(request_id: int, output: TextOutput, was_stopped: bool) -> Chunk | Failed:
    """An output as an error or a chunk. was_stopped: a stop request ended it, which is no error."""
    if output.finish_reason == FinishReason.ERROR.value:
        return Failed(request_id, output.error_code, output.error or "the engine failed on this request")
    if output.finish_reason == FinishReason.CANCELLED.value and not was_stopped:
        return Failed(request_id, "CANCELLED", "the request was cancelled")
    if output.finish_reason == FinishReason.TIMEOUT.value and not (
        output.statistics and output.statistics.num_output_tokens
    ):
        return Failed(request_id, "UNAVAILABLE", output.error or "the request timed out")
    return Chunk(
        id=request_id,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        statistics=output.statistics,
        log_probs=output.log_probs,
        logits=output.logits,
        is_draft=output.is_draft,
        tops=output.tops,
        context=output.context,
    )


def open_engine_dir(engine_dir: Path, config: ServiceConfig) -> tuple[ServedExecutor, Any]:
    """The executor and tokenizer of an engine directory; raises FaserError."""
    from faser_trtllm.builder.engine_dir import EngineDir
    from faser_trtllm.executor.factory import open_executor
    from faser_trtllm.models.tokenizer import Tokenizer
    from faser_trtllm.profiling.ensure import ensure_profile
    from faser_trtllm.serving.worker.faults import faults_of_environment, with_faults

    faults = faults_of_environment()
    tokenizer = Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir)
    ensure_profile(engine_dir, config)
    executor = open_executor(
        engine_dir,
        config,
        wrap_engine=lambda engine, role: with_faults(engine, role, faults),
        draft_timeout_ms=config.draft_timeout_ms,
    )
    return executor, tokenizer


def die_of_thread(failure: threading.ExceptHookArgs) -> None:
    """A threading.excepthook: a process with a dead thread is worse than none."""
    log.error("thread %s failed", failure.thread.name if failure.thread else "?", exc_info=failure.exc_value)
    os._exit(70)
