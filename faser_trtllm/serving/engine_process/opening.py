"""Opens the engines of an engine process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser_trtllm.config import ServiceConfig
from faser_trtllm.executor.executor import Executor

log = logging.getLogger("faser.engine")

SHUTTING_DOWN = "the server is shutting down; send the request to another one"

# The longest that another Python thread can delay the executor's thread after a pass; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0001


Opener = Callable[[Path, ServiceConfig], tuple[Executor, Any]]
"""Opens an engine directory; returns the executor, not yet started, and the tokenizer."""


def open_engine_dir(engine_dir: Path, config: ServiceConfig) -> tuple[Executor, Any]:
    """Return the executor, not yet started, and the tokenizer of an engine directory; raise FaserError."""
    from faser_trtllm.builder.engine_dir import EngineDir
    from faser_trtllm.executor.factory import open_executor
    from faser_trtllm.models.tokenizer import Tokenizer
    from faser_trtllm.profiling.ensure import ensure_profile
    from faser_trtllm.serving.launch.faults import fault_wrapper

    wrap_engine = fault_wrapper()
    engines = EngineDir.load(engine_dir)
    tokenizer = Tokenizer.load(engines.tokenizer_dir, engines.vocab_size)
    ensure_profile(engine_dir, config, replace_disturbed=False)  # `faser serve` does that before the first start
    executor = open_executor(
        engine_dir,
        config,
        wrap_engine=wrap_engine,
        draft_timeout_ms=config.draft_timeout_ms,
    )
    return executor, tokenizer


def die_of_thread(failure: threading.ExceptHookArgs) -> None:
    """A threading.excepthook: end the process, which cannot serve without the thread; the backend restarts it."""
    log.error("thread %s failed", failure.thread.name if failure.thread else "?", exc_info=failure.exc_value)
    os._exit(70)
