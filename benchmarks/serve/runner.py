"""Run `faser bench serve` and write serve.json and serve.md."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.environment import describe_environment
from benchmarks.serve.acceptance import Acceptance, between
from benchmarks.serve.arrivals import arrival_times
from benchmarks.serve.dataset import Conversation, read_dataset
from benchmarks.serve.options import ServeBenchOptions
from benchmarks.serve.outcome import Outcome
from benchmarks.serve.report import ServeReport, render_markdown
from benchmarks.serve.summary import summarize_load
from faser_trtllm.errors import InvalidArgumentError, UnavailableError, install
from faser_trtllm.models.tokenizer import Tokenizer

Log = Callable[[str], None]
_SHAREGPT_MAX_PROMPT, _SHAREGPT_MAX_TOTAL, _SHAREGPT_MIN = 1024, 2048, 4  # tokens; the limits of vLLM's benchmark


def run_serve_bench(options: ServeBenchOptions, log: Log) -> ServeReport:
    """Measure, and write serve.json and serve.md to output_dir if it is set; raises FaserError."""
    options.validate()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each request has an open connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    conversations = choose(options, read_dataset(options.dataset, options.dataset_path))
    if options.output_dir is not None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    model, outcomes, counters = asyncio.run(_run(options, conversations, log))
    load = summarize_load(outcomes, dict(options.goodput))
    report = ServeReport(options, describe_environment(options.command_line), model, load, counters)
    if options.output_dir is not None:
        (options.output_dir / "serve.json").write_text(json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n")
        (options.output_dir / "serve.md").write_text(render_markdown(report))
    return report


def choose(options: ServeBenchOptions, found: list[Conversation]) -> list[Conversation]:
    """Return a run's conversations in order; InvalidArgumentError if none is left."""
    if options.category is not None:
        categories = sorted({conversation.category for conversation in found})
        found = [conversation for conversation in found if conversation.category == options.category]
        if not found:
            known = ", ".join(categories[:32])
            raise InvalidArgumentError(f"category is {options.category!r}, the dataset has {known}")
    rng = np.random.default_rng(options.seed)
    wanted = options.num_prompts
    chosen: list[Conversation] = []
    while not chosen or (wanted is not None and len(chosen) < wanted):
        order = range(len(found)) if options.disable_shuffle else rng.permutation(len(found)).tolist()
        chosen += _with_lengths(options, [found[i] for i in order], None if wanted is None else wanted - len(chosen))
        if not chosen:
            raise InvalidArgumentError("no conversation of the dataset is within vLLM's limits of length; use another")
    if options.max_turns is not None or options.api != "openai-chat":
        # A completion has no history, so only first turns can be sent, as in vLLM's benchmark.
        most = (options.max_turns or 1) if options.api == "openai-chat" else 1
        chosen = [replace(conversation, turns=conversation.turns[:most]) for conversation in chosen]
    return chosen


def _with_lengths(options: ServeBenchOptions, found: list[Conversation], wanted: int | None) -> list[Conversation]:
    """Return at most `wanted`; with a tokenizer those within vLLM's limits, with outputs as long as the reference."""
    if options.tokenizer is None:
        return found[:wanted]
    tokenizer = Tokenizer.load(options.tokenizer)
    kept: list[Conversation] = []
    for conversation in found:
        if len(kept) == wanted:
            break
        texts = (conversation.turns[0], conversation.reference or "")
        num_input, num_output = (len(tokenizer.encode(text)) for text in texts)
        most_output = _SHAREGPT_MAX_TOTAL - num_input if num_input <= _SHAREGPT_MAX_PROMPT else 0
        if num_input >= _SHAREGPT_MIN and _SHAREGPT_MIN <= num_output <= most_output:
            kept.append(replace(conversation, output_len=num_output))
    return kept


async def _run(
    options: ServeBenchOptions, conversations: list[Conversation], log: Log
) -> tuple[str, list[Outcome], Acceptance | None]:
    """Run the conversations; return the model's name, the outcomes and the change of the server's counters."""
    try:
        import aiohttp
    except ImportError:
        raise UnavailableError(f"the bench needs aiohttp; {install('serve')}") from None
    from benchmarks.serve.client import Client
    from benchmarks.serve.load import Load

    body: dict[str, Any] = {"temperature": options.temperature, **(options.extra_body or {})}
    if options.ignore_eos:
        body["ignore_eos"] = True
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # Servers close idle connections (uvicorn after 5 s), and a request on a closing one fails.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        client = Client(session, options.base_url, options.api, body, options.timeout_s, time.perf_counter)
        models = await client.models()
        if options.model is None and not models:
            raise UnavailableError(f"the server at {options.base_url} has no model; give --model")
        body["model"] = options.model or models[0]
        load = Load(client, conversations, options.output_len)
        if options.num_warmups:
            log(f"warming up with {options.num_warmups} conversations")
            warmups = [conversations[i % len(conversations)] for i in range(options.num_warmups)]
            await Load(client, warmups, options.output_len).run_closed(options.max_concurrency)
        before = await client.counters()
        log(f"sending {len(conversations)} conversations to {body['model']}")
        if math.isinf(options.request_rate):
            outcomes = await load.run_closed(options.max_concurrency)
        else:
            arrivals = arrival_times(len(conversations), options.request_rate, options.burstiness, options.seed)
            outcomes = await load.run_open(arrivals, options.max_concurrency)
        after = await client.counters()
    counters = None if before is None or after is None else between(before, after)
    return body["model"], outcomes, counters
