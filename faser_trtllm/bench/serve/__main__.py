"""Measure an OpenAI server with the prompts of a published benchmark, from a local file.

Options have the names of `vllm bench serve`. With a --request_rate conversations arrive by themselves (an open loop),
whether or not earlier ones have been answered; without one --max_concurrency of them are kept running. OPENAI_API_KEY
is sent as the key. Nothing is downloaded; docs/benchmarking.md says where the files come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from faser_trtllm.bench.flags import Flags, say
from faser_trtllm.bench.serve.dataset import DATASETS
from faser_trtllm.bench.serve.options import ServeBenchOptions
from faser_trtllm.bench.serve.report import render_markdown
from faser_trtllm.bench.serve.runner import run_serve_bench
from faser_trtllm.errors import FaserError
from faser_trtllm.json_text import parse_json

EXAMPLES = """Examples:
  faser bench serve --dataset mt_bench --dataset_path question.jsonl --max_concurrency 8
  faser bench serve --dataset speed_bench --dataset_path qualitative.jsonl --category coding --temperature 1
  faser bench serve --dataset humaneval --dataset_path HumanEval.jsonl.gz --request_rate 4 --goodput ttft:300 tpot:50
  with --base_url http://127.0.0.1:8000 against vLLM"""


def flags() -> Flags[ServeBenchOptions]:
    """All of the bench's."""
    found = Flags("serve", ServeBenchOptions, __doc__, EXAMPLES)
    found.flag("dataset", ", ".join(DATASETS), convert=lambda text: text.lower().replace("-", "_"))
    found.flag("dataset_path", "the dataset's file: JSONL, perhaps .gz, or JSON for sharegpt")
    found.flag("base_url", "the server's address, with or without /v1")
    found.flag("model", "name to send; default: the server's first model")
    found.flag("backend", "openai (completions) or openai-chat; default: openai-chat, for humaneval openai")
    found.flag("request_rate", "conversations that begin per second; inf is a closed loop")
    found.flag("burstiness", "1 is Poisson, a smaller value comes in bunches")
    found.flag("max_concurrency", "conversations that run at a time at most; default: no limit")
    found.flag("num_prompts", "conversations to run; default: the dataset once")
    found.flag("num_warmups", "conversations before the measurement")
    found.flag("category", "only this category of the dataset")
    found.flag("max_turns", "turns of a conversation at most; default: all (vLLM's benchmark takes the first)")
    found.flag("output_len", "tokens of an answer at most, where the dataset names no length")
    found.flag("tokenizer", "for sharegpt: a directory with the tokenizer that counts the length of its answers")
    found.flag("temperature", "0 is greedy")
    found.flag("ignore_eos", "send ignore_eos, so that answers are as long as asked; not every server takes it")
    found.flag("extra_body", "JSON object with more fields of each request", convert=_object)
    bounds = "bounds in ms that a good request keeps: ttft:300 tpot:50 e2el:2000"
    found.add_argument("--goodput", nargs="+", type=_bound, help=bounds)
    found.flag("disable_shuffle", "send in the order of the file")
    found.flag("timeout_s", "seconds after which a request counts as failed")
    found.flag("seed", "of the order and the arrivals")
    found.flag("output_dir", "where serve.json and serve.md go; default: nothing is written")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text, finite=True)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"is {text!r:.60}, it must be a JSON object")
    return value


def _bound(text: str) -> tuple[str, float]:
    name, _, bound = text.partition(":")
    try:
        return name, float(bound)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r:.60}, it must be a name and ms as in ttft:300") from None


def main(argv: Sequence[str] | None = None) -> None:
    report = run_serve_bench(flags().parse(argv), say)
    print(render_markdown(report))
    if not report.load.num_completed:
        raise FaserError(f"all {report.load.num_requests} requests failed; the report says why")


if __name__ == "__main__":
    main()
