"""Run each case against a server, then the same without it; a case that breaks the rule is run again alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from benchmarks.bystander.attack import Attacker, Sent
from benchmarks.bystander.canary import Canary, Heard
from benchmarks.bystander.cases import Case
from benchmarks.bystander.rule import Outcome

_NOTHING = Heard((), ())


def run_cases(
    cases: Iterable[Case],
    attacker: Attacker,
    canary: Canary,
    *,
    seconds: float,
    engine_pid: Callable[[], int | None],
    tries: int = 3,
    log: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Return each case's outcome. seconds: time of each attack. tries: most runs of a case until it keeps the rule."""
    canary.wait(time.monotonic())
    text = canary.asked[-1].text
    found = []
    for case in cases:
        for _ in range(tries):
            outcome = _run_case(case, attacker, canary, seconds, engine_pid, text)
            if outcome.is_kept:
                break
            log(f"{case.name}: {describe(outcome)}")
        found.append(outcome)
    return found


def describe(outcome: Outcome) -> str:
    delays = "; ".join(
        f"{what} {found.p99:.0f} / {found.max:.0f} ms, without it {alone.p99:.0f} / {alone.max:.0f}"
        for what, (found, alone) in outcome.delays.items()
    )
    trouble = f"{outcome.trouble}; " if outcome.trouble else ""
    sent = outcome.sent
    what = f"refused in {min(sent.refused_ms):.0f} ms" if sent.is_refused and sent.refused_ms else "served"
    return f"{trouble}{what}; p99 / max: {delays}"


def _run_case(
    case: Case, attacker: Attacker, canary: Canary, seconds: float, engine_pid: Callable[[], int | None], text: str
) -> Outcome:
    pid, first = engine_pid(), len(canary.asked)
    canary.wait(time.monotonic())
    sent, heard = _listen(case, attacker, canary, seconds)
    alone = _NOTHING
    if sent.is_refused:
        begun_s = time.monotonic()
        time.sleep(seconds)
        alone = canary.heard(begun_s, time.monotonic())
    else:
        alone = _listen(case.plain(), attacker, canary, seconds)[1]
    wrong = [one for one in canary.asked[first:] if one.error or one.text != text]
    trouble = ""
    if engine_pid() != pid:
        trouble = "the engine process was restarted"
    elif case.is_allowed and sent.is_refused:
        trouble = f"the request is within the limits, and was refused: {sent.message[:200]}"
    elif wrong:
        trouble = wrong[0].error or f"the canary's text was {wrong[0].text!r}"
    return Outcome(case, sent, heard, alone, trouble)


def _listen(case: Case, attacker: Attacker, canary: Canary, seconds: float) -> tuple[Sent, Heard]:
    begun_s = time.monotonic()
    sent = attacker.run(case, seconds)
    return sent, canary.heard(begun_s, time.monotonic())
