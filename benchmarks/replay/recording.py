"""A recording of the demo pair's drafts after every prefix of its texts, so that a simulation needs no models."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.executor.executor import Sink
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.prompts import draw_prompts
from faser_trtllm.sampling.table import SamplingTable

NUM_PROMPTS, PROMPT_LEN, NUM_OUTPUT = 48, 128, 192  # as in `faser bench gpu`
NUM_SEEDED = 3  # seeded texts per prompt, in addition to the greedy one
TEMPERATURE = 0.8
TOKENS_PER_BLOCK = 16
MAX_DRAFT_LEN = 8


@dataclass(frozen=True)
class Recording:
    """A recording of chains of drafts after the first t output tokens.

    is_seeded [num_texts]: seeded, not greedy. num_right [num_texts, num_output]: correct drafts at a chain's start.
    margins [num_texts, num_output, max_draft_len]: margins of all drafts (Request.draft_margins).
    """

    is_seeded: npt.NDArray[np.bool_]
    num_right: npt.NDArray[np.int32]
    margins: npt.NDArray[np.float32]

    @property
    def max_draft_len(self) -> int:
        return int(self.margins.shape[2])

    def save(self, path: Path) -> None:
        with path.open("wb") as file:  # numpy would add .npz to a path
            np.savez_compressed(file, is_seeded=self.is_seeded, num_right=self.num_right, margins=self.margins)

    @staticmethod
    def load(path: Path) -> Recording:
        with np.load(path) as found:
            return Recording(found["is_seeded"], found["num_right"], found["margins"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint_dir", type=Path, default=Path("engines/demo/target"))
    parser.add_argument("--draft_checkpoint_dir", type=Path, default=Path("engines/demo/draft"))
    parser.add_argument("--recording", type=Path, help="file to keep and reuse the recording")


def open_recording(given: argparse.Namespace) -> Recording:
    """Return the kept recording, or a new one."""
    if given.recording is not None and given.recording.exists():
        return Recording.load(given.recording)
    recording = record(given.checkpoint_dir, given.draft_checkpoint_dir, MAX_DRAFT_LEN)
    if given.recording is not None:
        recording.save(given.recording)
    return recording


def record(checkpoint_dir: Path, draft_checkpoint_dir: Path, max_draft_len: int) -> Recording:
    """Build both engines in a temporary folder, and run them."""
    tokenizer = Tokenizer.load(checkpoint_dir)
    prompts = draw_prompts(
        lambda text: tokenizer.encode(text, add_special_tokens=False), NUM_PROMPTS, PROMPT_LEN, seed=0
    ).token_ids
    with tempfile.TemporaryDirectory(prefix="faser-replay-") as folder:
        engines = build_engines(
            BuildOptions(
                checkpoint_dir,
                draft_checkpoint_dir,
                Path(folder) / "engines",
                max_batch_size=NUM_PROMPTS,
                max_seq_len=PROMPT_LEN + NUM_OUTPUT + max_draft_len,
                max_draft_len=max_draft_len,
                tokens_per_block=TOKENS_PER_BLOCK,
            )
        )
        assert engines is not None
        found = [_record_texts(engines, prompts, variant, max_draft_len) for variant in range(1 + NUM_SEEDED)]
    num_right, margins = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Recording(np.arange(len(num_right)) >= len(prompts), num_right, margins)


def _record_texts(
    engines: EngineDir, prompts: tuple[tuple[int, ...], ...], variant: int, max_draft_len: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    params = [
        SamplingParams(max_tokens=NUM_OUTPUT + max_draft_len)
        if variant == 0
        else SamplingParams(max_tokens=NUM_OUTPUT + max_draft_len, temperature=TEMPERATURE, seed=1000 * variant + i)
        for i in range(len(prompts))
    ]
    texts: list[list[int]] = [list(prompt) for prompt in prompts]
    with open_executor(engines.path, ExecutorConfig(speculation="off", num_threads=1)) as executor:
        for i, text in enumerate(texts):
            executor.submit(str(i), prompts[i], params[i], _writer(text))
        while executor.step():
            pass
    return _draft_everywhere(engines, np.array(texts, np.int32), params, max_draft_len)


def _draft_everywhere(
    engines: EngineDir, texts: npt.NDArray[np.int32], params: list[SamplingParams], max_draft_len: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the chains of drafts after each number of output tokens, and their margins."""
    n, length = texts.shape
    blocks = -(-length // TOKENS_PER_BLOCK)
    block_table = np.arange(n * blocks, dtype=np.int32).reshape(n, blocks)
    num_right = np.zeros((n, NUM_OUTPUT), np.int32)
    margins = np.zeros((n, NUM_OUTPUT, max_draft_len), np.float32)
    with ExitStack() as stack:
        draft = stack.enter_context(
            CpuEngine.open(
                engines.draft_path,
                stack.enter_context(CoreSet(None, 1)),
                num_blocks=block_table.size,
                tokens_per_block=TOKENS_PER_BLOCK,
                max_batch_size=n,
                max_num_tokens=n * PROMPT_LEN,
            )
        )
        sampling = SamplingTable(n, draft.spec.vocab_size, max_draft_len)
        requests = [
            Request(str(i), text[:PROMPT_LEN], params[i], max_seq_len=length, max_draft_len=max_draft_len)
            for i, text in enumerate(texts)
        ]
        for slot, request in enumerate(requests):
            sampling.bind(slot, request)
        builder = BatchBuilder(block_table)
        for t in range(NUM_OUTPUT):
            known = PROMPT_LEN + t
            builder.clear()
            for slot, request in enumerate(requests):
                request.tokens[:known] = texts[slot, :known]
                builder.add(slot, request.tokens, known - 1 if t else 0, known, 1)
            num_tokens, none, num_new = (np.full(n, count, np.int32) for count in (known, 0, max_draft_len))
            draft.draft(DraftBatch(builder.build(), sampling.array, num_tokens, none, num_new, max_draft_len))
            for slot, request in enumerate(requests):
                chain = slice(known, known + max_draft_len)
                right = request.tokens[chain] == texts[slot, chain]
                num_right[slot, t] = np.cumprod(right).sum()
                margins[slot, t] = request.draft_margins[chain]
    return num_right, margins


def _writer(text: list[int]) -> Sink:
    def write(output: RequestOutput) -> bool:
        text.extend(output.new_token_ids)
        return False

    return write
