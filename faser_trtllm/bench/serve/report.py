"""The report of `faser bench serve`, as JSON and Markdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from faser_trtllm.bench.environment import portable
from faser_trtllm.bench.markdown import table
from faser_trtllm.bench.serve.cpu_use import CpuUse
from faser_trtllm.bench.serve.options import Objectives, ServeBenchOptions
from faser_trtllm.bench.serve.overhead import OverheadReport
from faser_trtllm.bench.serve.summary import PERCENTILES, Distribution, LoadSummary


@dataclass(frozen=True)
class ServeReport:
    """Either load and load_cpu or overhead is set."""

    options: ServeBenchOptions
    environment: dict[str, Any]
    prompt_source: str
    num_shortened: int = 0
    load: LoadSummary | None = None
    load_cpu: CpuUse | None = None
    overhead: OverheadReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: paths without machine-specific folders, percentiles by name."""
        options = {
            name: portable(str(value)) if name in ("engine_dir", "output_dir", "trace") and value is not None else value
            for name, value in asdict(self.options).items()
            if name != "command_line"
        }
        report: dict[str, Any] = {
            "options": options,
            "environment": self.environment,
            "prompt_source": self.prompt_source,
            "num_shortened": self.num_shortened,
        }
        if self.load is not None:
            report["load"] = asdict(self.load) | {"cancelled_share": self.load.cancelled_share}
            report["load_cpu"] = asdict(self.load_cpu) if self.load_cpu else None
        if self.overhead is not None:
            report["overhead"] = asdict(self.overhead) | {
                "served_share": asdict(self.overhead.served_share),
                "overhead": self.overhead.overhead,
            }
        named: dict[str, Any] = _with_named_percentiles(report)
        return named


def render_markdown(report: ServeReport) -> str:
    """The whole report."""
    env = report.environment
    commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
    changed = " with local changes" if env["git_dirty"] else ""
    head = [
        "# faser bench serve",
        "",
        f"{env['date']}, {env['cpu']}, {env['num_cores']} cores, {env['memory_gib']:.0f} GiB, "
        f"{env['os']}{commit}{changed}.  ",
        f"Prompts from the {report.prompt_source}; end ids ignored.  ",
        f"`{env['command_line']}`",
    ]
    if _is_disturbed(report):
        head.insert(2, "**Other processes or machines used the processor meanwhile, do not quote these numbers.**  ")
    if report.load is not None and report.load.num_synthetic:
        head.insert(2, "**Drafts were accepted by synthetic_acceptance: the outputs are not the target's.**  ")
    sections = ["\n".join(head)]
    if report.load is not None:
        sections.append(_load(report, report.load))
    if report.overhead is not None:
        sections.append(_overhead(report, report.overhead))
    return "\n\n".join(sections) + "\n"


def _is_disturbed(report: ServeReport) -> bool:
    uses = [report.load_cpu] if report.load_cpu is not None else []
    if report.overhead is not None:
        uses += [side.cpu for pair in report.overhead.rounds for side in pair]
    return any(use.is_disturbed for use in uses)


def _load(report: ServeReport, load: LoadSummary) -> str:
    rows = [
        ("arrivals", _arrivals(report.options)),
        ("requests", f"{load.num_requests} in {load.duration_s:.1f} s"),
        ("completed, cancelled by the bench, failed", f"{load.num_completed}, {load.num_cancelled}, {load.num_failed}"),
        ("cancelled share", f"{100 * load.cancelled_share:.1f} %"),
        ("completed requests per s", f"{load.requests_per_s:.2f}"),
        ("output tokens per s", f"{load.output_tokens_per_s:.0f}"),
        ("tokens per response", _number(load.tokens_per_chunk)),
        ("accepted of drafted tokens", _number(load.acceptance_rate)),
    ]
    if load.goodput_requests_per_s is not None:
        share = "-" if load.goodput_share is None else f"{100 * load.goodput_share:.1f} % of those not cancelled"
        rows.append(
            (f"goodput at {_objectives(report.options.objectives)}", f"{load.goodput_requests_per_s:.2f}/s, {share}")
        )
    if report.num_shortened:
        rows.append(("requests shortened to the engine's max_seq_len", str(report.num_shortened)))
    latencies = [
        ("time to first token", load.ttft),
        ("time per output token", load.tpot),
        ("end to end", load.e2e),
        ("gap between responses", load.chunk_gap),
        ("sent too late by the bench", load.late),
    ]
    notes = [
        "Open loop: a request is sent when it is due, whatever became of those before it, and its times count from "
        "then, so that a late bench does not flatter the service. TTFT, TPOT and end to end are of completed requests.",
        "Time per output token is (last response - first) / (tokens - 1), as in vLLM's benchmark; a response brings "
        "the tokens of one step, so the gaps between responses are longer.",
    ]
    if report.load_cpu is not None:
        cpu = report.load_cpu
        notes.append(
            f"Shares of all cores' time here: bench {_percent(cpu.bench)}, service {_percent(cpu.service)}, others "
            f"{_percent(cpu.other)}."
        )
    text = "## Load\n\n" + table(("", ""), rows) + "\n\n" + _latencies(latencies)
    if load.errors:
        text += "\n\nFailures:\n\n" + "\n".join(f"- {count} x {message}" for message, count in load.errors.items())
    return text + "\n\n" + "\n".join(f"- {note}" for note in notes)


def _overhead(report: ServeReport, overhead: OverheadReport) -> str:
    share = overhead.served_share
    rows = []
    for number, (own, served) in enumerate(overhead.rounds, 1):
        rows.append(
            (
                str(number),
                f"{own.tokens_per_s:.0f}",
                f"{served.tokens_per_s:.0f}",
                f"{100 * (1 - served.tokens_per_s / own.tokens_per_s):.1f} %",
                f"{_median(own.ttft)} / {_median(served.ttft)}",
                f"{_median(own.tpot)} / {_median(served.tpot)}",
                f"{_percent(served.cpu.service)}, {_percent(served.cpu.bench)}",
                f"{_percent(own.cpu.other)} / {_percent(served.cpu.other)}",
            )
        )
    header = (
        "round",
        "in process tok/s",
        "served tok/s",
        "overhead",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "service, client CPU",
        "others' CPU",
    )
    same = overhead.num_compared - overhead.num_different
    notes = [
        f"{overhead.num_requests} requests per round, {overhead.concurrency} in flight on both sides, speculation "
        f"{report.options.speculation or 'as configured'}, stream_interval {report.options.stream_interval}, greedy; "
        "the same requests on both sides, other ones in each round. Tokens per second over a whole round, from the "
        "first request to the end of the last.",
        "In process: the executor and the text work in this process, driven step by step, as `faser generate` does. "
        "Served: the same behind Triton, one gRPC stream per request.",
        "Client and service share this machine: what the client takes is in the overhead. It would not be with a "
        "client elsewhere, but the network would."
        if report.options.url is None
        else "The service at --url is assumed to run the same engines and settings on this machine.",
        "Two numbers in a cell: in process / served. CPU: shares of all cores' time.",
        f"Tokens identical on both sides: {same} of {overhead.num_compared} requests.",
    ]
    verdict = (
        f"**Serving takes {100 * overhead.overhead:.1f} % of the throughput** (median of {len(overhead.rounds)} "
        f"rounds; range {100 * (1 - share.high):.1f} to {100 * (1 - share.low):.1f} %)."
    )
    lines = "\n".join(f"- {note}" for note in notes)
    return f"## Served against in process\n\n{verdict}\n\n{table(header, rows)}\n\n{lines}"


def _latencies(latencies: list[tuple[str, Distribution | None]]) -> str:
    rows = []
    for name, found in latencies:
        if found is not None:
            values = (found.mean_ms, *found.percentiles_ms, found.max_ms)
            rows.append((name, str(found.count), *(f"{value:.1f}" for value in values)))
    return table(("ms", "n", "mean", *(f"p{p}" for p in PERCENTILES), "max"), rows)


def _arrivals(options: ServeBenchOptions) -> str:
    if options.arrivals == "trace":
        assert options.trace is not None
        return f"trace {options.trace.name}, time x {options.time_scale:g}"
    text = f"{options.arrivals}, {options.request_rate:g} requests/s"
    if options.arrivals == "gamma":
        text += f", burstiness {options.burstiness:g}"
    if options.arrivals == "bursts":
        text += f" in the mean, {options.peak_ratio:g}x in every other half of {options.period_s:g} s"
    return text


def _objectives(objectives: Objectives) -> str:
    return ", ".join(f"{name} {bound:g}" for name, bound in asdict(objectives).items() if bound is not None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _median(found: Distribution | None) -> str:
    return "-" if found is None else f"{found.percentiles_ms[PERCENTILES.index(50)]:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _with_named_percentiles(value: Any) -> Any:
    if isinstance(value, dict):
        named = {key: _with_named_percentiles(item) for key, item in value.items() if key != "percentiles_ms"}
        for percent, item in zip(PERCENTILES, value.get("percentiles_ms", ()), strict=False):
            named[f"p{percent}_ms"] = item
        return named
    if isinstance(value, list | tuple):
        return [_with_named_percentiles(item) for item in value]
    return value
