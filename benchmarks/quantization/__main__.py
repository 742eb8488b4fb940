"""Measure quality and speed of int8 and int4 weights on this machine, as Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quantization.quality import perplexities, random_errors
from benchmarks.quantization.speed import PREFILL, measure_speed
from faser_trtllm import native
from faser_trtllm.fingerprint import cpu_model

DEMO = Path(__file__).parents[2] / "engines/demo/target"
# The demo target's MLP of 704 has no groups of 128.
DEMO_SCHEMES = ("none", *(scheme + head for scheme in ("int8", "W8A8", "int4", "W4A8") for head in ("", "+head")))
SCHEMES = ("int8", "W8A8", "int4", "W4A8", "int4:128", "W4A8:128")
SIZES = (12, 768, 3072, 16384)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench quantization", description=__doc__)
    parser.add_argument("--windows", type=int, default=24, help="windows of 512 tokens for the perplexity")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 8, PREFILL])
    parser.add_argument(
        "--sizes", type=int, nargs=4, default=SIZES, metavar=("LAYERS", "HIDDEN", "INTERMEDIATE", "VOCAB")
    )
    parser.add_argument("--skip", choices=["quality", "speed"], nargs="*", default=[])
    args = parser.parse_args(argv)
    print(f"{cpu_model()}, {native.isa()}", flush=True)
    if "quality" not in args.skip:
        print("\n| demo target | perplexity |\n|---|---|")
        for name, perplexity in perplexities(DEMO, DEMO_SCHEMES, args.windows).items():
            print(f"| {name} | {perplexity:.3f} |", flush=True)
        print("\n| random model | RMS error of the logits | equal argmax |\n|---|---|---|")
        for name, (error, equal) in random_errors(SCHEMES).items():
            print(f"| {name} | {error:.4f} | {equal:.3f} |", flush=True)
    if "speed" not in args.skip:
        speed = measure_speed(SCHEMES, args.rows, args.rounds, tuple(args.sizes))
        print("\n| scheme | file, MB |" + "".join(f" {n} rows: CPU ms | over bf16 |" for n in args.rows))
        print("|---|---|" + "---|---|" * len(args.rows))
        for name, num_bytes in speed.file_bytes.items():
            cells = [cell for cell in speed.cells if cell.scheme == name]
            print(f"| {name} | {num_bytes / 1e6:.0f} |" + "".join(f" {c.cpu_ms:.1f} | {c.ratio:.2f} |" for c in cells))


if __name__ == "__main__":
    main()
