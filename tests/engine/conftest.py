"""Engines of tiny models for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet
from tests.support.engine_harness import Harness
from tests.support.tiny_model import TinyModel

MAX_BATCH_SIZE = 6

OpenHarness = Callable[..., Harness]


@pytest.fixture
def open_harness(tmp_path: Path) -> Iterator[OpenHarness]:
    """Open an engine over a model with blocks enough for all slots; everything is closed after the test."""
    with ExitStack() as stack:

        def open_one(
            model: TinyModel,
            *,
            tokens_per_block: int = 32,
            num_threads: int | None = None,
            segments: list[int] | None = None,
            max_num_tokens: int = 512,
            seed: int = 0,
        ) -> Harness:
            path = model.write(tmp_path / f"{len(list(tmp_path.iterdir()))}.engine", segments)
            core_set = stack.enter_context(CoreSet(num_threads=num_threads))
            engine = CpuEngine.open(
                path,
                core_set,
                num_blocks=MAX_BATCH_SIZE * -(-model.config.max_seq_len // tokens_per_block),
                tokens_per_block=tokens_per_block,
                max_batch_size=MAX_BATCH_SIZE,
                max_num_tokens=max_num_tokens,
            )
            return Harness(stack.enter_context(engine), seed)

        yield open_one
