"""The report as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bystander.memory import Held
from benchmarks.bystander.rule import Delay, Outcome
from benchmarks.bystander.runner import describe
from benchmarks.common.markdown import table
from benchmarks.soak.growth import MIB

REST_SHARE = 0.1
REST_SLACK_BYTES = 32 << 20
MAX_REFUSAL_MS = 50.0
NUM_SHOWN = 12


@dataclass(frozen=True)
class Rest:
    """Resident bytes of the engine process before the cases and a while after them."""

    before: int
    after: int

    @property
    def is_kept(self) -> bool:
        return self.after <= (1 + REST_SHARE) * self.before + REST_SLACK_BYTES


def as_dict(
    outcomes: Sequence[Outcome], helds: Sequence[Held], rest: Rest, environment: dict[str, Any]
) -> dict[str, Any]:
    def delays(outcome: Outcome) -> dict[str, Any]:
        return {
            what: {"p99_ms": found.p99, "max_ms": found.max, "alone_p99_ms": alone.p99, "alone_max_ms": alone.max}
            for what, (found, alone) in outcome.delays.items()
        }

    return {
        "environment": environment,
        "cases": [
            {
                "name": one.case.name,
                "transport": one.case.transport,
                "batch": one.case.batch,
                "num_sequences": one.case.num_sequences,
                "is_kept": one.is_kept,
                "trouble": one.trouble,
                "num_served": one.sent.num_served,
                "refused_ms": one.sent.refused_ms,
                "message": one.sent.message[:200],
                **delays(one),
            }
            for one in outcomes
        ],
        "held": [
            {
                "name": held.case.name,
                "body_bytes": held.num_body_bytes,
                "bytes_each": held.bytes_each,
                "is_waiting": held.is_waiting,
            }
            for held in helds
        ],
        "rest": {"before_bytes": rest.before, "after_bytes": rest.after},
    }


def render_markdown(outcomes: Sequence[Outcome], helds: Sequence[Held], rest: Rest, environment: dict[str, Any]) -> str:
    broken = [outcome for outcome in outcomes if not outcome.is_kept]
    refusals = [min(outcome.sent.refused_ms) for outcome in outcomes if outcome.sent.is_refused]
    too_much = [held for held in helds if not held.is_kept]
    lines = [
        ("cases that break the rule", f"{len(broken)} of {len(outcomes)}", "0"),
        (
            "refusals above 50 ms, the best of each case",
            f"{sum(ms > MAX_REFUSAL_MS for ms in refusals)} of "
            f"{len(refusals)}, {max(refusals, default=0):.0f} ms at most",
            "0",
        ),
        ("cases that hold too much while they wait", f"{len(too_much)} of {len(helds)}", "0"),
        (
            "resident memory 30 s after, MiB",
            f"{rest.before / MIB:.0f} before, {rest.after / MIB:.0f} after",
            f"{(rest.before * (1 + REST_SHARE) + REST_SLACK_BYTES) / MIB:.0f}",
        ),
    ]
    sections = [
        f"# faser bench bystander\n\n{environment['date']}, {environment['cpu']}, {environment['num_cores']} cores, "
        f"commit {(environment['git_commit'] or '')[:12]}.  \n`{environment['command_line']}`",
        table(("what", "found", "bound"), lines),
        "Over all cases, ms:\n\n" + _overall(outcomes),
        f"The {NUM_SHOWN} with the longest waits:\n\n" + _longest(outcomes),
    ]
    if broken:
        sections.append("Broken:\n\n" + "\n".join(f"- {one.case.name}: {describe(one)}" for one in broken))
    if too_much:
        sections.append("Too much memory:\n\n" + "\n".join(f"- {held.case.name}: {held}" for held in too_much))
    return "\n\n".join(sections) + "\n"


def _overall(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for what, heard, alone in (
        ("first token", [o.heard.first_ms for o in outcomes], [o.alone.first_ms for o in outcomes]),
        ("gap", [o.heard.gaps_ms for o in outcomes], [o.alone.gaps_ms for o in outcomes]),
    ):
        found = [Delay.of([ms for times in part for ms in times]) for part in (heard, alone)]
        rows.append((what, *(f"{delay.p99:.0f} / {delay.max:.0f}" for delay in found)))
    return table(("p99 / max", "next to the attacks", "next to plain requests or none"), rows)


def _longest(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in sorted(outcomes, key=lambda one: -one.worst_ms)[:NUM_SHOWN]:
        pairs = (f"{found.max:.0f} ({alone.max:.0f})" for found, alone in one.delays.values())
        rows.append((one.case.name, "refused" if one.sent.is_refused else "served", *pairs))
    return table(("case", "", "first token, max (without)", "gap, max (without)"), rows)
