"""Generate text in process, without a server: all prompts run as one batch.

    faser build --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft \\
      --output_dir engines/built/demo
    python examples/generate.py --engine_dir engines/built/demo

Run it twice, with `--speculation off` and with `--speculation fixed:4`: the text is the same.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import FaserError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.serving.text.offline import generate_all

PROMPTS = ("def fibonacci(n):", "class Cache:")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--speculation", default="auto", help="off, fixed:K, schedule, gp_lcb, price or auto")
    args = parser.parse_args()

    prompts = args.prompt or PROMPTS
    try:
        with contextlib.closing(
            open_executor(args.engine_dir, ExecutorConfig(speculation=args.speculation))
        ) as executor:
            # faser_trtllm/serving/text/request.py has all fields: temperature, seed, stop_words and so on.
            completions = generate_all(executor, args.engine_dir, prompts, {"max_tokens": args.max_tokens})
            for prompt, completion in zip(prompts, completions, strict=True):
                print(f"{prompt}{completion.text}")
                print(
                    f"[{completion.num_output_tokens} tokens, {completion.num_accepted_tokens} of "
                    f"{completion.num_draft_tokens} drafts accepted]",
                    file=sys.stderr,
                )
    except FaserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
