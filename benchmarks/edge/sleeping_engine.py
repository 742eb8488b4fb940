"""An engine process with the real executor, whose target sleeps while a GPU would compute.

A step is a pass of FASER_FAKE_STEP_S seconds and yields one token, a character, per request.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.host.null_engines import NullEngine
from faser_trtllm.config import ExecutorConfig, ServiceConfig
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.serving.engine_process.main import main
from lab.delegating_engine import DelegatingEngine

MAX_BATCH_SIZE, MAX_SEQ_LEN, TOKENS_PER_BLOCK = 256, 2048, 32


class SleepingEngine(DelegatingEngine):
    def __init__(self, inner: NullEngine, pass_s: float) -> None:
        super().__init__(inner)
        self._pass_s = pass_s

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        time.sleep(self._pass_s)
        return super().forward(batch)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for every byte and no special ones, so that every token is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer.to_str())


def open_sleeping(engine_dir: Path, config: ServiceConfig) -> tuple[Executor, Tokenizer]:
    """Open the executor, whatever the directory holds; an Opener."""
    tokenizer = byte_tokenizer()
    spec = EngineSpec(
        vocab_size=tokenizer.vocab_size,
        max_seq_len=MAX_SEQ_LEN,
        num_layers=1,
        num_blocks=MAX_BATCH_SIZE * MAX_SEQ_LEN // TOKENS_PER_BLOCK,
        tokens_per_block=TOKENS_PER_BLOCK,
        max_num_tokens=MAX_BATCH_SIZE * TOKENS_PER_BLOCK,
        max_batch_size=MAX_BATCH_SIZE,
        segments=(0, 1),
    )
    executor = assemble(
        SleepingEngine(NullEngine(spec), float(os.environ["FASER_FAKE_STEP_S"])),
        None,
        make_policy("off", 0, None, MAX_BATCH_SIZE),
        ExecutorConfig(),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=0,
        clock=MonotonicClock(),
    )
    return executor, tokenizer


if __name__ == "__main__":
    main(opener=open_sleeping)
