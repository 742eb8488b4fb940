"""Measure an OpenAI server with the prompts of a published benchmark, from a local file.

Options are named as in `vllm bench serve`. With --request_rate conversations start at that rate (an open loop),
without it --max_concurrency of them are kept running (a closed loop). OPENAI_API_KEY is sent as the key. Nothing is
downloaded; docs/benchmarking.md lists the sources of the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.common.flags import Flags, say
from benchmarks.serve.dataset import DATASETS
from benchmarks.serve.options import ServeBenchOptions
from benchmarks.serve.report import render_markdown
from benchmarks.serve.runner import run_serve_bench
from faser_trtllm.errors import FaserError
from faser_trtllm.json_text import parse_json

EXAMPLES = """Examples:
  faser bench serve --dataset mt_bench --dataset_path question.jsonl --max_concurrency 8
  faser bench serve --dataset speed_bench --dataset_path qualitative.jsonl --category coding --temperature 1
  faser bench serve --dataset humaneval --dataset_path HumanEval.jsonl.gz --request_rate 4 --goodput ttft:300 tpot:50
  with --base_url http://127.0.0.1:8000 against vLLM"""


def flags() -> Flags[ServeBenchOptions]:
    found = Flags("serve", ServeBenchOptions, __doc__, EXAMPLES)
    found.flag("dataset", f"one of {', '.join(DATASETS)}", convert=lambda text: text.lower().replace("-", "_"))
    found.flag("dataset_path", "the dataset's file: JSONL or JSONL.gz, for sharegpt JSON")
    found.flag("base_url", "address of the server, with or without /v1")
    found.flag("model", "name of the model; default: the server's first one")
    found.flag("backend", "openai (completions) or openai-chat; default: openai for humaneval, else openai-chat")
    found.flag("request_rate", "conversations that start per second; inf runs a closed loop")
    found.flag("burstiness", "1 for Poisson arrivals, less for bursts")
    found.flag("max_concurrency", "most conversations that run at a time; default: no limit")
    found.flag("num_prompts", "conversations to run; default: the whole dataset once")
    found.flag("num_warmups", "conversations before the measurement")
    found.flag("category", "run only this category of the dataset")
    found.flag("max_turns", "most turns of a conversation; default: all (vLLM's benchmark runs the first)")
    found.flag("output_len", "most tokens of an answer, if the dataset has no length")
    found.flag("tokenizer", "for sharegpt: directory of the tokenizer that measures its answers")
    found.flag("temperature", "sampling temperature; 0 is greedy")
    found.flag("ignore_eos", "send ignore_eos, so that answers have full length; not every server supports it")
    found.flag("extra_body", "JSON object with further fields of each request", convert=_object)
    bounds = "limits in ms that a request must meet to count for goodput: ttft:300 tpot:50 e2el:2000"
    found.add_argument("--goodput", nargs="+", type=_bound, help=bounds)
    found.flag("disable_shuffle", "send conversations in the order of the file")
    found.flag("timeout_s", "seconds after which a request counts as failed")
    found.flag("seed", "seed for the order and the arrivals")
    found.flag("output_dir", "directory for serve.json and serve.md; default: write nothing")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text, finite=True)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; it must be a JSON object")
    return value


def _bound(text: str) -> tuple[str, float]:
    name, _, bound = text.partition(":")
    try:
        return name, float(bound)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r:.60}; it must be a name and ms as in ttft:300") from None


def main(argv: Sequence[str] | None = None) -> None:
    report = run_serve_bench(flags().parse(argv), say)
    print(render_markdown(report))
    if not report.load.num_completed:
        raise FaserError(f"all {report.load.num_requests} requests failed; the report says why")


if __name__ == "__main__":
    main()
