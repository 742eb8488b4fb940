"""Compare our engine, llama.cpp and OpenVINO at equal bits, by rows and for a prefill.

    faser bench peers.bits --output_dir out --llama_python L/bin/python --openvino_python O/bin/python

The interpreters need llama-cpp-python, and openvino-genai with optimum-intel and nncf; peers without one are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.bits.models import BITS
from benchmarks.peers.bits.options import PEERS, BitsOptions
from benchmarks.peers.bits.runner import run_bits


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="faser bench peers.bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--checkpoint_dir", type=Path, help="a Llama or Qwen3-MoE, such as engines/demo/target")
    parser.add_argument("--no_random", action="store_true", help="skip the random model of 431 million weights")
    parser.add_argument("--bits", nargs="+", default=list(BITS), choices=BITS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--prompt_len", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--llama_python", type=Path)
    parser.add_argument("--openvino_python", type=Path)
    parser.add_argument("--num_threads", type=int)
    parser.add_argument(
        "--activation_bits",
        type=int,
        default=16,
        choices=(16, 8),
        help="activation bits of our engine; 8 builds W8A8 and W4A8",
    )
    parser.add_argument("--files_dir", type=Path, help="directory to keep and reuse engines and GGUF files")
    args = parser.parse_args(argv)
    options = BitsOptions(
        output_dir=args.output_dir,
        checkpoint_dir=args.checkpoint_dir,
        random=not args.no_random,
        bits=tuple(args.bits),
        rows=tuple(args.rows),
        prompt_len=args.prompt_len,
        steps=args.steps,
        rounds=args.rounds,
        peers=tuple(args.peers),
        llama_python=args.llama_python,
        openvino_python=args.openvino_python,
        num_threads=args.num_threads,
        activation_bits=args.activation_bits,
        files_dir=args.files_dir,
        command_line=tuple(sys.argv),
    )
    print(run_bits(options, lambda line: print(line, file=sys.stderr, flush=True)).markdown())


if __name__ == "__main__":
    main()
