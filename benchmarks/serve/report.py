"""The report of `faser bench serve`, as JSON and Markdown."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.environment import portable
from benchmarks.common.markdown import table
from benchmarks.serve.acceptance import Acceptance, pooled
from benchmarks.serve.options import ServeBenchOptions
from benchmarks.serve.summary import PERCENTILES, LoadSummary

_LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between pieces of an answer (ITL)",
    "e2el": "end to end (E2EL)",
    "late": "sent after it was due",
}


@dataclass(frozen=True)
class ServeReport:
    """The report of a run. counters: those of the server's /metrics during the run, None if it has none."""

    options: ServeBenchOptions
    environment: dict[str, Any]
    model: str
    load: LoadSummary
    counters: Acceptance | None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with paths as in portable() and an infinite rate as "inf"."""
        options = {
            name: portable(str(value)) if name in ("dataset_path", "output_dir", "tokenizer") and value else value
            for name, value in asdict(self.options).items()
            if name != "command_line"
        }
        if math.isinf(self.options.request_rate):
            options["request_rate"] = "inf"
        counters = None if self.counters is None else self.counters.as_dict()
        head = {"model": self.model, "options": options, "environment": self.environment}
        return head | self.load.as_dict() | {"acceptance_of_server": counters}


def render_markdown(report: ServeReport) -> str:
    env, load, options = report.environment, report.load, report.options
    lines = [
        "# faser bench serve",
        "",
        f"{env['date']}; the client on {env['cpu']}, {env['num_cores']} cores.  ",
        f"Model {report.model} at {options.base_url}, {options.dataset} by {options.api}.  ",
        f"`{env['command_line']}`",
    ]
    if load.num_synthetic:
        lines[1:1] = ["", "**Drafts were accepted by synthetic_acceptance: the outputs are not the target's.**"]
    sections = ["\n".join(lines), table(("", ""), _rows(report)), _latencies(load), _acceptance(report)]
    if load.errors:
        sections.append("Failures:\n\n" + "\n".join(f"- {count} x {text}" for text, count in load.errors.items()))
    return "\n\n".join([*sections, "\n".join(f"- {note}" for note in _notes(report))]) + "\n"


def _rows(report: ServeReport) -> list[tuple[str, str]]:
    load, options = report.load, report.options
    found = load.as_dict()
    loop = "closed loop" if math.isinf(options.request_rate) else f"{options.request_rate:g} conversations/s"
    if not math.isinf(options.request_rate):
        loop += ", Poisson" if options.burstiness == 1.0 else f", burstiness {options.burstiness:g}"
    loop += f", at most {options.max_concurrency} at a time" if options.max_concurrency else ""
    rows = [
        ("arrivals", loop),
        ("requests", f"{load.num_requests} in {load.duration_s:.1f} s"),
        ("completed, failed", f"{load.num_completed}, {load.num_failed}"),
        ("input tokens, output tokens", f"{load.num_input_tokens}, {load.num_output_tokens}"),
        ("completed requests per s", f"{found['request_throughput']:.2f}"),
        ("output tokens per s, all tokens", f"{found['output_throughput']:.1f}, {found['total_token_throughput']:.1f}"),
        ("output tokens per piece", _number(found["tokens_per_piece"])),
    ]
    if load.good is not None:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in options.goodput)
        share = f"{100 * load.good / load.num_requests:.1f} % of all requests"
        rows.append((f"goodput at {bounds}", f"{found['request_goodput']:.2f}/s, {share}"))
    if load.num_uncounted:
        rows.append(("completed, but their tokens not counted by the server", str(load.num_uncounted)))
    return rows


def _latencies(load: LoadSummary) -> str:
    rows = []
    for name, words in _LATENCIES.items():
        found = getattr(load, name)
        if found is not None:
            values = (found.mean_ms, *found.percentiles_ms, found.max_ms)
            rows.append((words, str(found.count), *(f"{value:.1f}" for value in values)))
    return table(("ms", "n", "mean", *(f"p{p}" for p in PERCENTILES), "max"), rows)


def _acceptance(report: ServeReport) -> str:
    load = report.load
    found = dict(load.acceptance)
    if len(found) > 1:
        found["all"] = pooled(load.acceptance.values())
    if report.counters is not None:
        found["server's counters"] = report.counters
    if not found:
        return "The server reports nothing about speculation, neither per request nor at /metrics."
    rows = []
    for name, acceptance in found.items():
        counts = (acceptance.num_steps, acceptance.num_drafts, acceptance.num_accepted)
        positions = " ".join(f"{rate:.2f}" for rate in acceptance.by_position[:8])
        numbers = (_number(acceptance.length), _number(acceptance.rate))
        rows.append((name, *numbers, *map(str, counts), positions or "-"))
    header = ("category", "acceptance length", "acceptance rate", "steps", "drafted", "accepted", "by position")
    text = table(header, rows)
    if not load.acceptance:
        text += (
            "\n\nThe server gives no record per request, so the counters are those of all its requests during the "
            "run; for one category at a time run with --category."
        )
    elif load.num_recorded < load.num_completed:
        text += f"\n\n{load.num_completed - load.num_recorded} completed requests have no record."
    return text


def _notes(report: ServeReport) -> list[str]:
    notes = [
        "Times start when a request is due: at its arrival, in a closed loop at its turn, and for a later turn of a "
        "conversation at the end of the preceding answer. Latencies are of completed requests.",
        "TPOT is (last piece - first) / (tokens - 1), as in vLLM's benchmark; a piece has the tokens of one or more "
        "steps, so the gaps between pieces (vLLM's ITL) are longer. Tokens are counted by the server.",
    ]
    if report.load.acceptance or report.counters is not None:
        notes.append(
            "Acceptance length: tokens per verification step, the target's own included (1 + accepted / steps). By "
            "position: the share of steps that accepted the first draft, the second, and so on."
        )
    return notes


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
