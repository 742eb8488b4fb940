"""A server's metrics page, made up from the executor's statistics."""

import io

from rich.console import Console

from faser_trtllm.commands import top as top_command
from faser_trtllm.executor.stats import HISTOGRAMS
from faser_trtllm.serving.observe.families import FAMILIES, HISTOGRAM_FAMILIES, READY, Stats
from faser_trtllm.serving.observe.scrape import parse_metrics

STATS = {
    "timestamp": 1000.0,
    "is_ready": 1.0,
    "num_running": 3.0,
    "num_waiting": 7.0,
    "max_batch_size": 8.0,
    "num_steps": 100.0,
    "num_steps_serial": 75.0,
    "num_steps_ping_pong": 25.0,
    "num_output_tokens": 1000.0,
    "num_draft_tokens": 400.0,
    "num_accepted_tokens": 300.0,
    "num_drafts": 200.0,
    "num_verified_rows": 1000.0,
    "num_oracle_rows": 900.0,
    "num_accepted_tokens_per_pos[0]": 180.0,
    "num_accepted_tokens_per_pos[1]": 120.0,
    "num_verified_by_len[0]": 50.0,
    "num_verified_by_len[1]": 50.0,
    "num_verified_by_len[2]": 100.0,
    "draft_ms": 1000.0,
    "verify_ms": 4000.0,
    "kv_num_blocks": 100.0,
    "kv_num_free_blocks": 75.0,
    "kv_tokens_per_block": 16.0,
    "num_prefix_tokens": 50.0,
    "num_prefix_hit_tokens": 10.0,
}


def metrics_text(stats, successes=10.0, waits=0):
    """Return the metrics page of a server with these stats; waits: requests that queued between 0.1 and 0.25 s."""
    lines = []

    def line(name, value, **labels):
        inside = ",".join(f'{key}="{text}"' for key, text in {"model": "faser", "version": "1", **labels}.items())
        lines.append(f"{name}{{{inside}}} {value}")

    for family in (*FAMILIES, READY):
        for key, value in family.read(Stats(stats)).items():
            line(family.name, value, **({family.label: key} if family.label else {}))
    for family in HISTOGRAM_FAMILIES:
        bounds = [*HISTOGRAMS[family.key], float("inf")]
        for bound in bounds:
            line(f"{family.name}_bucket", waits if bound >= 0.25 else 0, le="+Inf" if bound == bounds[-1] else bound)
    line("faser_request_success_total", successes, finished_reason="stop")
    line("faser_request_failures_total", 0, code="INTERNAL")
    return "\n".join(lines) + "\n"


def scrape(stats, **more):
    return parse_metrics(metrics_text(stats, **more))


def rendered(view, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(top_command.render(view, "http://x/metrics"))
    return console.file.getvalue()
