"""Loss of quality by quantization: perplexity of the demo target, and logits of a random model against bf16."""

from __future__ import annotations

import random
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.quantization.random_model import random_config, scheme_named, write_random_engine
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.partition.core_set import CoreSet

WINDOW = 512
BLOCK = 32
SKIPPED = ("site-packages", "dist-packages", "/test/", "/tests/", "idlelib", "lib2to3", "ensurepip", "__pycache__")


@contextmanager
def opened(path: Path, core_set: CoreSet, num_tokens: int = WINDOW) -> Iterator[tuple[CpuEngine, BatchBuilder]]:
    """Open an engine with room for one sequence, and a builder of its batches."""
    num_blocks = -(-num_tokens // BLOCK)
    table = np.arange(num_blocks, dtype=np.int32).reshape(1, -1)
    with CpuEngine.open(
        path, core_set, num_blocks=num_blocks, tokens_per_block=BLOCK, max_batch_size=1, max_num_tokens=num_tokens
    ) as engine:
        yield engine, BatchBuilder(table)


def logits_of(engine: CpuEngine, builder: BatchBuilder, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return logits [tokens, vocab_size] of one sequence from its beginning."""
    builder.clear()
    builder.add(0, tokens, 0, tokens.size, tokens.size)
    return engine.forward(builder.build())[:, : engine.spec.vocab_size]


def library_windows(checkpoint_dir: Path, count: int) -> list[npt.NDArray[np.int32]]:
    """Return shuffled windows of every 20th file of the standard library.

    The demo target was trained on such files and many of these, so their perplexity compares schemes, not models.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not any(part in str(path) for part in SKIPPED)]
    files = [path for path in files if path.stat().st_size < 400_000]
    random.Random(0).shuffle(files)
    tokenizer = Tokenizer.load(checkpoint_dir)
    ids: list[int] = []
    for path in files[::20]:
        ids += [0, *tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore"))]
        if len(ids) > count * (WINDOW + 1):
            break
    whole = np.array(ids, np.int32)
    return [whole[i * WINDOW : (i + 1) * WINDOW + 1] for i in range(min(count, (len(ids) - 1) // WINDOW))]


def perplexities(checkpoint_dir: Path, schemes: Sequence[str], num_windows: int) -> dict[str, float]:
    """Return the perplexity of Python text by scheme, each token given earlier ones of its window."""
    windows = library_windows(checkpoint_dir, num_windows)
    found = {}
    with tempfile.TemporaryDirectory() as folder, CoreSet() as core_set:
        for name in schemes:
            text, _, head = name.partition("+")
            options = BuildOptions(
                checkpoint_dir, None, Path(folder) / name, quantization=text, quantize_lm_head=bool(head)
            )
            engines = build_engines(options)
            assert engines is not None
            losses = []
            with opened(engines.target_path, core_set) as (engine, builder):
                for window in windows:
                    logits = logits_of(engine, builder, window[:-1]).astype(np.float64)
                    highest = logits.max(1)
                    mass = np.log(np.exp(logits - highest[:, None]).sum(1)) + highest
                    losses.append(mass - logits[np.arange(len(logits)), window[1:]])
            found[name] = float(np.exp(np.concatenate(losses).mean()))
    return found


def random_errors(schemes: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return by scheme (relative RMS error, share of equal argmax) of a random model's logits against bf16."""
    config = random_config(num_layers=4, hidden_size=512, intermediate_size=1536, vocab_size=2048)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 256).astype(np.int32)
    logits: dict[str, npt.NDArray[np.float32]] = {}
    with tempfile.TemporaryDirectory() as folder, CoreSet() as core_set:
        for name in ("none", *schemes):
            path = Path(folder) / f"{name}.engine"
            write_random_engine(path, config, scheme_named(name))
            with opened(path, core_set) as (engine, builder):
                logits[name] = logits_of(engine, builder, tokens).copy()
    exact = logits["none"]
    return {
        name: (
            float(np.sqrt(((logits[name] - exact) ** 2).mean()) / exact.std()),
            float((logits[name].argmax(1) == exact.argmax(1)).mean()),
        )
        for name in schemes
    }
