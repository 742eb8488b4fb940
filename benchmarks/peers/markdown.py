"""A bench report as Markdown tables."""

from __future__ import annotations

from benchmarks.common.environment import MAX_FOREIGN_SHARE
from benchmarks.common.markdown import table
from benchmarks.common.stats import Summary, paired_ratio, summarize
from benchmarks.peers.report import FASER, OFF, BenchReport, CaseResult, Form


def render_markdown(report: BenchReport) -> str:
    """Return the report; ratios are medians over rounds with their range."""
    sections = [_head(report), _exactness(report), _absences(report), _summary(report)]
    sections += [_cases(report, form) for form in report.forms]
    sections += [_steps(report), _notes(report)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(report: BenchReport) -> str:
    env, options = report.environment, report.options
    cores = ", ".join(map(str, options["cores"]))
    commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
    changed = " with local changes" if env["git_dirty"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(env["versions"].items()))
    held_out = "held out from the demo pair's training" if report.prompts["held_out"] else "not all of it held out"
    return "\n".join(
        [
            "# faser bench",
            "",
            f"{env['date']}, {env['cpu']}, {options['num_threads']} threads on cores {cores}, "
            f"{env['memory_gib']:.0f} GiB, {env['os']}{commit}{changed}.  ",
            f"{versions}.  ",
            _quietness(env["other_share"], env["steal_share"]),
            f"Greedy, bf16, {report.prompts['num_prompts']} prompts of {options['prompt_len']} tokens "
            f"from the {report.prompts['source']} ({held_out}), {options['max_tokens']} new tokens each, "
            "end ids ignored.  ",
            f"Median of {options['rounds']} interleaved rounds after one that is dropped; tokens per second "
            "include prefill; ratios are taken within a round.  ",
            f"`{env['command_line']}`",
        ]
    )


def _quietness(other_share: float, steal_share: float) -> str:
    others, machines = _percent(other_share), _percent(steal_share)
    shares = f"Other processes used {others} of the cores' time, other machines {machines}"
    if other_share + steal_share > MAX_FOREIGN_SHARE:
        return f"**The machine was busy, do not quote these numbers.** {shares}.  "
    return f"{shares}.  "


def _exactness(report: BenchReport) -> str:
    lines = ["## Exactness"]
    for form, item in zip(report.forms, report.exactness, strict=True):
        scope = f"{item.num_cases} cases (speculation settings x batch sizes) of {item.num_sequences} sequences"
        verdict = "all tokens identical" if item.difference is None else f"NOT IDENTICAL: {item.difference}"
        lines.append(f"- {form.label}: {scope}: {verdict}.")
    return "\n".join(lines)


def _absences(report: BenchReport) -> str:
    if not report.absences:
        return ""
    labels = {form.expand: f"{form.num_layers} layers" for form in report.forms}
    rows = [(a.system, labels[a.expand], a.reason, a.fix) for a in report.absences]
    return "## Peers that did not run, or not as wanted\n\n" + table(("system", "form", "reason", "fix"), rows)


def _summary(report: BenchReport) -> str:
    peers = list(dict.fromkeys((case.system, _family(case)) for case in report.cases if case.system != FASER))
    header = ["form", "batch", "off tok/s", "best speculation", "tok/s", "vs off"]
    header += [f"vs {system} {family}" for system, family in peers]
    rows = []
    for form in report.forms:
        for batch_size in dict.fromkeys(case.batch_size for case in report.select(form.expand)):
            rows.append(_summary_row(report, form, batch_size, peers))
    return "## Summary\n\n" + table(header, rows)


def _summary_row(report: BenchReport, form: Form, batch_size: int, peers: list[tuple[str, str]]) -> list[str]:
    off = report.baseline(report.select(form.expand, batch_size, FASER)[0])
    best = report.best_speculation(form.expand, batch_size) or off
    row = [f"{form.num_layers} layers", str(batch_size), _rate(off), best.setting, _rate(best)]
    row.append(_ratio(report.ratio_to_off(best)))
    for system, family in peers:
        cases = [c for c in report.select(form.expand, batch_size, system) if _family(c) == family]
        peer = max(cases, key=lambda case: summarize(case.tokens_per_s).median, default=None)
        row.append(_against(off, best, peer) if peer else "-")
    return row


def _against(off: CaseResult, best: CaseResult, peer: CaseResult) -> str:
    plain = paired_ratio(off.tokens_per_s, peer.tokens_per_s).median
    speculating = paired_ratio(best.tokens_per_s, peer.tokens_per_s).median
    return f"{speculating:.2f} (off {plain:.2f})"


def _family(case: CaseResult) -> str:
    """Return the family of a case: assisted:2 and assisted:4 are one, of which the summary shows the best."""
    return case.setting.partition(":")[0]


def _cases(report: BenchReport, form: Form) -> str:
    header = ["batch", "system", "setting", "tok/s", "range", "vs off", "accepted/drafted", "tokens/pass"]
    header += ["draft", "verify", "same text"]
    rows = []
    for case in sorted(report.select(form.expand), key=lambda case: case.batch_size):
        rates = summarize(case.tokens_per_s)
        rows.append(
            (
                str(case.batch_size),
                case.system,
                case.setting,
                f"{rates.median:.0f}",
                f"{rates.low:.0f} to {rates.high:.0f}",
                _ratio(report.ratio_to_off(case)),
                "-" if case.acceptance is None else f"{case.acceptance:.2f}",
                f"{case.tokens_per_pass:.2f}",
                _percent(case.share("draft_ms")),
                _percent(case.share("verify_ms")),
                f"{case.agreement.num_identical}/{case.agreement.num_sequences}"
                f" ({_percent(case.agreement.prefix_share)})",
            )
        )
    return f"## {form.label}\n\n" + table(header, rows)


def _steps(report: BenchReport) -> str:
    if not report.steps:
        return ""
    systems = list(dict.fromkeys(step.system for step in report.steps))
    medians = {(s.expand, s.num_rows, s.system): s for s in report.steps}
    rows = []
    for form in report.forms:
        for num_rows in dict.fromkeys(s.num_rows for s in report.steps if s.expand == form.expand):
            row = [f"{form.num_layers} layers", str(num_rows)]
            ours = medians[form.expand, num_rows, FASER]
            for system in systems:
                step = medians.get((form.expand, num_rows, system))
                if step is None:
                    row.append("-")
                    continue
                text = f"{summarize(step.step_ms).median:.3f}"
                if system != FASER:
                    text += f" (x{paired_ratio(step.step_ms, ours.step_ms).median:.2f})"
                row.append(text)
            rows.append(row)
    return "## One forward pass, ms\n\n" + table(("form", "rows", *systems), rows)


def _notes(report: BenchReport) -> str:
    notes = [
        "same text: sequences identical to ours at speculation off and the first batch size, and the mean "
        "share of tokens before the first difference. Peers round bf16 elsewhere, so near ties may fall "
        "differently.",
        "tokens/pass: committed tokens per request and target pass. draft, verify: shares of the wall time.",
        f"best speculation is picked after the fact, as is a peer's best setting; vs off: ours at {OFF}.",
        "The enlarged form has layers that add exactly zero: real acceptance at a higher cost, not a better model.",
        "llama.cpp decodes plainly here (no draft model), through its low-level interface.",
        "openvino: its pipeline with continuous batching; assisted:K: its own speculation, for one request only.",
    ]
    return "## Notes\n\n" + "\n".join(f"- {note}" for note in notes)


def _rate(case: CaseResult) -> str:
    return f"{summarize(case.tokens_per_s).median:.0f}"


def _ratio(ratio: Summary) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
