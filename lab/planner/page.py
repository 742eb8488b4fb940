"""A plan as one self-contained HTML page, which opens offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from html import escape

from lab.planner.advice import notes, service_config
from lab.planner.plan import Band, Plan, Run
from lab.planner.svg import bars, lines
from lab.planner.text import HEADINGS, cells

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 0.6rem 0.25rem 0; border-bottom: 1px solid #8884; white-space: nowrap; }
tr.chosen td { font-weight: 600; }
pre { background: #8881; padding: 0.8rem; overflow-x: auto; }
.scroll { overflow-x: auto; } .modeled { border-left: 4px solid #ee6677; padding-left: 0.8rem; }
svg { width: 100%; max-width: 62rem; display: block; height: auto; margin: 0.6rem 0; }
"""


def render_page(plan: Plan) -> str:
    q = plan.question
    title = f"{q['target']} with {q['draft']} on {q['num_gpus']} x {q['gpu']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="modeled">{escape(notes(plan)[0])}</p>',
        _definitions(plan),
        "<h2>Recommended</h2>",
        f"<p><b>{escape(plan.recommended)}</b>: the best system for these loads, or the simplest among equals.</p>",
        f"<pre>{escape(service_config(plan))}</pre>",
        "<h2>Memory of one GPU</h2>",
        _memory(plan),
    ]
    for load in dict.fromkeys(run.load for run in plan.runs):
        body += [f"<h2>{escape(load)}</h2>", *_load(plan, [run for run in plan.runs if run.load == load])]
    body += ["<h2>How to read it</h2>", _list(notes(plan))]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _load(plan: Plan, runs: Sequence[Run]) -> list[str]:
    chosen = plan.recommended
    parts = [
        bars("Throughput", {run.system: run.tokens_per_s for run in runs}, "tokens/s", marked=chosen),
        bars("Time per token, p50", {run.system: run.tpot_ms["p50"] for run in runs}, "ms", 1, marked=chosen),
        bars("Time to first token, p99", {run.system: run.ttft_ms["p99"] for run in runs}, "ms", marked=chosen),
    ]
    if plan.question["ttft_ms"] or plan.question["tpot_ms"]:
        shares = {run.system: Band(*(100.0 * x for x in astuple(run.goodput))) for run in runs}
        parts.append(bars("Requests within the objectives", shares, "%", marked=chosen))
    if runs[0].concurrency is None:
        shown = [run for run in runs if run.system in ("off", "fixed:3", "schedule", "price", chosen)]
        series = {run.system: [count / 60.0 for count in run.tokens_by_minute] for run in shown}
        parts.append(lines("Tokens per second by minute", series, "minute of the trace"))
    rows = [(cells(run), run.system == chosen) for run in runs]
    return [*parts, f'<div class="scroll">{_table(HEADINGS, rows)}</div>']


def _definitions(plan: Plan) -> str:
    q = plan.question
    limits = [f"{name.upper()} at most {q[f'{name}_ms']:g} ms" for name in ("ttft", "tpot") if q[f"{name}_ms"]]
    rows = [
        ("requests", f"{q['prompt_len_mean']} tokens in, {q['output_len_mean']} out, in the mean"),
        ("acceptance by place", ", ".join(f"{rate:.2f}" for rate in q["acceptance_by_place"])),
        ("objectives", ", ".join(limits) or "none, so all requests count"),
        ("quantization", q["quantization"]),
        ("costs", f"{plan.source}, {plan.anchors}"),
    ]
    return _table((), [(row, False) for row in rows])


def _memory(plan: Plan) -> str:
    rows = [
        (
            name,
            f"{room.weights_gb:.1f} GB",
            f"{room.kv_gb:.1f} GB",
            f"{room.kv_tokens:,}",
            f"{room.max_batch_size:,} of {room.mean_len} tokens",
        )
        for name, room in plan.memory.items()
    ]
    return _table(("drafting", "weights", "cache", "tokens in it", "largest batch"), [(row, False) for row in rows])


def _table(headings: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in headings)}</tr>" if headings else ""
    body = [
        f"<tr class='{name}'>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row, name in ((row, "chosen" if chosen else "") for row, chosen in rows)
    ]
    return f"<table>{head}{''.join(body)}</table>"


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
