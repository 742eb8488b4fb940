"""`faser check`: verifies and describes an engine directory, and compares tokens with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import FaserError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.launch.engine_report import cuda_file_line, engine_report
from faser_trtllm.serving.text.offline import generate_all

PROMPTS = ("The", "def main(", "0, 1, 2, 3,")
NUM_TOKENS = 24


def check_engine_dir(path: Path) -> Iterator[str]:
    """Yield one line per check that passed; raise FaserError at the first one that fails."""
    engines = EngineDir.load(path, verify_hashes=True)
    yield f"ok: every file has the size and hash of the manifest ({path})"
    tokenizer = Tokenizer.load(engines.tokenizer_dir, engines.vocab_size)
    ends = ", ".join(f"{tokenizer.token(i)!r} ({i})" for i in tokenizer.eos_token_ids)
    yield f"note: texts end with {ends or 'no token'}"
    if engines.backend == "cuda":
        yield from _cuda_report(engines)
        return
    if engines.backend != "cpu":
        yield from engine_report(engines)
        yield "note: nothing was run; faser generate --interpret runs these networks on the CPU"
        return
    plain = _generate(path, "off")
    yield f"ok: the target generates ({sum(map(len, plain))} tokens)"
    if not engines.build_config.max_draft_len:
        yield "note: there is no draft engine, so speculation stays off"
        return
    for num_drafts in sorted({1, engines.build_config.max_draft_len}):
        if _generate(path, f"fixed:{num_drafts}") != plain:
            raise FaserError(
                f"speculation fixed:{num_drafts} changed the greedy tokens of {path}; this is a bug, please report it"
            )
        yield f"ok: fixed:{num_drafts} gives the same greedy tokens as the target alone"


def _cuda_report(engines: EngineDir) -> Iterator[str]:
    paths = {"target": engines.target_path} | ({"draft": engines.draft_path} if engines.has_draft else {})
    for role, path in paths.items():
        yield cuda_file_line(role, path)
    yield "note: nothing was run; these engines need an NVIDIA GPU, a CUDA build of torch, cuda-python and nvcc"


def _generate(path: Path, speculation: str) -> list[tuple[int, ...]]:
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "end_ids": ()}
    with open_executor(path, ExecutorConfig(speculation=speculation)) as executor:
        return [completion.token_ids for completion in generate_all(executor, path, PROMPTS, fields)]
