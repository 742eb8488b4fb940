"""Measure the loss of quality by fp8 of the TensorRT backends.

Their networks run interpreted on the CPU, on Python text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.quantization.quality import WINDOW, library_windows
from faser_trtllm.builder.network.fp8 import CheckpointLayers
from faser_trtllm.builder.network.fp8_recipe import Fp8Recipe
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.vendor import load_tensorrt
from faser_trtllm.builder.source import Source, open_sources
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.models.calibration import calibration_text
from lab.interpreted.engine import InterpretedEngine

ROWS = 128  # per pass

Windows = list[npt.NDArray[np.int32]]


def logits_of(source: Source, windows: Windows, input_scales: dict[str, float] | None) -> npt.NDArray[np.float32]:
    """Return logits [windows * WINDOW, vocab_size] of the model in bf16, or with input_scales in fp8."""
    options = NetworkOptions(
        dtype="bfloat16",
        max_batch_size=1,
        max_num_tokens=ROWS,
        max_seq_len=WINDOW,
        tokens_per_block=WINDOW,
        max_query_rows=ROWS,
    )
    fp8 = None if input_scales is None else CheckpointLayers(source.weights, input_scales)
    trt = load_tensorrt("tensorrt_rtx")
    found = []
    with InterpretedEngine(trt, source.config, source.weights, options, (), fp8) as engine:
        builder = BatchBuilder(np.zeros((1, 1), np.int32))
        for window in windows:
            for start in range(0, WINDOW, ROWS):
                builder.clear()
                builder.add(0, window, start, start + ROWS, ROWS)
                found.append(engine.forward(builder.build()))
    return np.concatenate(found)


def perplexity(logits: npt.NDArray[np.float32], windows: Windows) -> float:
    """Return the perplexity of each token given earlier ones of its window."""
    wide = logits.astype(np.float64)
    highest = wide.max(1)
    mass = np.log(np.exp(wide - highest[:, None]).sum(1)) + highest
    following = np.concatenate([window[1:] for window in windows])
    return float(np.exp((mass - wide[np.arange(len(wide)), following]).mean()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench quantization.fp8", description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("engines/demo/target"))
    parser.add_argument("windows", type=int, nargs="?", default=12)
    given = parser.parse_args(argv)
    with ExitStack() as stack:
        (source,) = open_sources(given.checkpoint, None, 1, (), stack)
        windows = library_windows(given.checkpoint, given.windows)
        recipe = Fp8Recipe(frozenset({"target"}), calibration_text(None))
        scales = recipe.input_scales(source.config, source.weights, source.checkpoint.tokenizer)
        plain, quantized = logits_of(source, windows, None), logits_of(source, windows, scales)
    before, after = perplexity(plain, windows), perplexity(quantized, windows)
    print(
        f"perplexity of {len(plain)} tokens: bf16 {before:.3f}, FP8 {after:.3f} ({100 * (after / before - 1):+.2f} %)"
    )
    print(f"the same most probable token: {100 * (plain.argmax(1) == quantized.argmax(1)).mean():.1f} %")
    error = np.linalg.norm(quantized - plain) / np.linalg.norm(plain)
    print(f"the difference's norm over the logits': {100 * error:.1f} %")


if __name__ == "__main__":
    main()
