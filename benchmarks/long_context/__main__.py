"""Measure prompts of thousands of tokens on the CPU engine, as Markdown.

The demo target runs with more positions than it was trained on, so times are meaningful but texts are not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.markdown import table
from benchmarks.long_context.measure import LongPrompt, build_long, measure
from faser_trtllm import native
from faser_trtllm.fingerprint import cpu_model

DEMO = Path(__file__).parents[2] / "engines/demo/target"


def render(found: Sequence[LongPrompt]) -> str:
    header = (
        "prompt",
        "chunks",
        "first token, s",
        "tokens/s",
        "first chunk, s",
        "last chunk, s",
        "decode, ms",
        "KV cache, MiB",
        "found again",
        "first token then, s",
    )
    return table(
        header,
        [
            (
                str(item.num_tokens),
                str(item.num_chunks),
                f"{item.prefill_s:.2f}",
                f"{item.num_tokens / item.prefill_s:.0f}",
                f"{item.first_chunk_s:.2f}",
                f"{item.last_chunk_s:.2f}",
                f"{item.decode_ms:.2f}",
                f"{item.kv_bytes / 2**20:.0f}",
                str(item.num_reused),
                f"{item.reuse_s:.3f}",
            )
            for item in found
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="faser bench long_context", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint_dir", type=Path, default=DEMO)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--chunk", type=int, default=1024, help="most tokens of a pass")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--num_threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        max_seq_len = -(-(max(args.lengths) + args.steps + 16) // 64) * 64
        engine_dir = build_long(args.checkpoint_dir, Path(folder), max_seq_len, args.chunk)
        found = measure(engine_dir, args.lengths, args.steps, args.num_threads)
    clock = "CPU time" if args.num_threads == 1 else "wall time"
    print(f"{cpu_model()}, {native.isa()}, {args.num_threads} threads, chunks of {args.chunk} tokens, {clock}\n")
    print(render(found))


if __name__ == "__main__":
    main()
