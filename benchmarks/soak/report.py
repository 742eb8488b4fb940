"""The report of a soak, as JSON and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.environment import portable
from benchmarks.common.markdown import table
from benchmarks.soak.growth import MIB, Growth, Trend
from benchmarks.soak.ledger import Ending, Ledger
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.verdict import Condition, Resting
from benchmarks.soak.watch import Sample

_PATHS = ("engine_dir", "output_dir")


@dataclass(frozen=True)
class SoakReport:
    """The report. warmup, ledger: ledgers of the warm-up and the load of `seconds`. samples: those since start_s."""

    options: SoakOptions
    environment: dict[str, Any]
    seconds: float
    start_s: float
    concurrency: int
    warmup: Ledger
    ledger: Ledger
    conditions: tuple[Condition, ...]
    baseline: Resting
    end: Resting
    growths: tuple[Growth, ...]
    trends: tuple[Trend, ...]
    samples: Sequence[Sample]

    @property
    def has_passed(self) -> bool:
        return all(condition.is_met for condition in self.conditions)

    @property
    def failures(self) -> Counter[str]:
        return self.warmup.failures + self.ledger.failures

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with paths as in portable() and times since the start of the load."""
        options = asdict(self.options)
        del options["command_line"]
        options |= {name: portable(str(options[name])) for name in _PATHS}
        ledger = self.ledger
        return {
            "has_passed": self.has_passed,
            "options": options,
            "environment": self.environment,
            "seconds": self.seconds,
            "concurrency": self.concurrency,
            "conditions": [asdict(condition) for condition in self.conditions],
            "requests": [
                {"transport": transport, "kind": kind, "ending": ending.value, "count": count}
                for (transport, kind, ending), count in sorted(ledger.counts.items())
            ],
            "cancelled_before_first_token": ledger.cancelled_early,
            "num_tokens": ledger.num_tokens,
            "failures": dict(self.failures),
            "kills": [
                {"at_s": k.killed_s - self.start_s, "role": k.role, "recovery_s": k.recovery_s} for k in ledger.kills
            ],
            "pauses": [[begin_s - self.start_s, end_s - self.start_s] for begin_s, end_s in ledger.pauses],
            "baseline": asdict(self.baseline),
            "end": asdict(self.end),
            "growths": [asdict(growth) for growth in self.growths],
            "trends": [asdict(trend) for trend in self.trends],
            "samples": [
                {
                    "at_s": round(s.at_s - self.start_s, 2),
                    "num_tokens": s.num_tokens,
                    "processes": {
                        role: [p.pid, round(p.rss_bytes / MIB, 2), p.num_fds, p.num_threads]
                        for role, p in s.processes.items()
                    },
                }
                for s in self.samples
            ],
            "columns_of_processes": ["pid", "rss_mib", "num_fds", "num_threads"],
        }


def render_markdown(report: SoakReport) -> str:
    """Return the report without the samples."""
    env, ledger = report.environment, report.ledger
    commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
    changed = " with local changes" if env["git_dirty"] else ""
    sections = [
        "\n".join(
            [
                "# faser bench soak",
                "",
                f"{env['date']}, {env['cpu']}, {env['num_cores']} cores, {env['memory_gib']:.0f} GiB, "
                f"{env['os']}{commit}{changed}.  ",
                f"{report.seconds / 60:.1f} minutes after {report.options.warmup_s:g} s of warm-up, "
                f"{report.concurrency} requests in flight, {ledger.total()} requests, "
                f"{ledger.num_tokens / report.seconds:.0f} tokens per second, {len(ledger.kills)} kills, "
                f"{len(ledger.pauses)} pauses.  ",
                f"`{env['command_line']}`",
            ]
        ),
        f"**{'Passed' if report.has_passed else 'FAILED'}.**",
        table(
            ("condition", "found", "bound", ""),
            [(c.name, c.found, c.bound, "ok" if c.is_met else "**FAILED**") for c in report.conditions],
        ),
        "## Requests\n\n" + _requests(ledger),
    ]
    if report.failures:
        lines = "\n".join(f"- {count} x {reason}" for reason, count in report.failures.most_common())
        sections.append(f"Failures:\n\n{lines}")
    if ledger.kills:
        sections.append("## Kills\n\n" + _kills(report))
    if report.growths:
        sections.append("## Resident memory\n\n" + _memory(report.growths))
    sections.append(_notes(report))
    return "\n\n".join(sections) + "\n"


def _requests(ledger: Ledger) -> str:
    endings = tuple(Ending)
    rows: dict[tuple[str, str], Counter[Ending]] = {}
    for (transport, kind, ending), count in sorted(ledger.counts.items()):
        rows.setdefault((transport, kind), Counter())[ending] += count
    return table(
        ("over", "sent", *(ending.value for ending in endings)),
        [(*key, *(str(counts[ending]) for ending in endings)) for key, counts in rows.items()],
    )


def _kills(report: SoakReport) -> str:
    rows = [
        (f"{k.killed_s - report.start_s:.0f}", k.role, "-" if k.recovery_s is None else f"{k.recovery_s:.2f}")
        for k in report.ledger.kills
    ]
    return table(("at second", "process", "first token of a request sent after it, s"), rows)


def _memory(growths: Sequence[Growth]) -> str:
    rows = [
        (g.role, str(g.num_lives), f"{g.first_mib:.1f}", f"{g.last_mib:.1f}", f"{g.mib:+.2f}", f"{g.mib_per_hour:+.1f}")
        for g in growths
    ]
    return table(("process", "lives", "first tenth, MiB", "last tenth, MiB", "by slope, MiB", "MiB per hour"), rows)


def _notes(report: SoakReport) -> str:
    notes = [
        "Every request has one ending. finished: with exactly the text that the target alone gives in process, greedy "
        "or with a seed. cancelled, timed out: what had come was the beginning of that text. refused: bad input, with "
        "the sentence for it. served, refused: hostile requests (the worst cases of `faser bench bystander`), whatever "
        "their text. lost to a kill: UNAVAILABLE, or a cut connection, between a kill and the recovery, and until "
        "clients of a killed server have connected again. failed: anything else.",
        f"Cancelled before their first token, so in the queue or the prefill: {report.ledger.cancelled_early}.",
        "Memory is judged in the calm after all kills and pauses, its first third left out. Growth by slope: "
        "the median slope between all pairs of samples, times the time. MiB/h: least squares over the anonymous memory "
        "in a rest of 3 s after each minute of load, when no request is open.",
        "Descriptors and threads: at rest after the load against at rest after the warm-up.",
    ]
    return "## Notes\n\n" + "\n".join(f"- {note}" for note in notes)
