"""`faser top`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from faser_trtllm.errors import FaserError, InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from faser_trtllm.serving.observe.view import View

EXAMPLES = "Examples: faser top; faser top --url http://127.0.0.1:8002/metrics --once; faser top --once --json"

_WINDOW_S = 10.0
_BAR_WIDTH = 10
_MAX_LENGTHS = 7  # rows of the table of lengths; the last one includes longer ones


def top(
    url: Annotated[
        str, typer.Option("--url", help="metrics address of a running server")
    ] = "http://127.0.0.1:8002/metrics",
    interval: Annotated[float, typer.Option("--interval", help="seconds between two updates")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="watch for two intervals, print once and exit")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --once: print one JSON object")] = False,
) -> None:
    """Watch a running server: requests, acceptance, cache and latencies."""
    if not 0.1 <= interval <= 3600.0:
        raise InvalidArgumentError(f"interval is {interval:g}, allowed is 0.1 to 3600 (seconds)")
    if as_json and not once:
        raise InvalidArgumentError("--json prints a single update; add --once")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise InvalidArgumentError(
            f"url is {url!r}; it must start with http:// or https://; give one like http://127.0.0.1:8002/metrics"
        )
    if url.rstrip("/").count("/") == 2:
        url = url.rstrip("/") + "/metrics"
    if once:
        _print_once(url, interval, as_json)
    else:
        _watch(url, interval)


def _print_once(url: str, interval: float, as_json: bool) -> None:
    from rich.console import Console

    from faser_trtllm.serving.observe.view import fetch, make_view

    before = fetch(url)
    time.sleep(2.0 * interval)
    view = make_view(fetch(url), before)
    if as_json:
        print(json.dumps(asdict(view)))
    else:
        Console().print(render(view, url))


def _watch(url: str, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from faser_trtllm.serving.observe.view import fetch, make_view

    console = Console()
    scrapes = deque([fetch(url)], maxlen=max(2, 1 + round(_WINDOW_S / interval)))
    view = make_view(scrapes[0])
    with ExitStack() as stack:
        if console.is_terminal:
            live = stack.enter_context(Live(render(view, url), console=console, screen=True, auto_refresh=False))
        while True:
            note = None
            try:
                time.sleep(interval)
                scrapes.append(fetch(url))
                view = make_view(scrapes[-1], scrapes[0])
            except FaserError as error:
                note = str(error)
            except KeyboardInterrupt:
                return
            if console.is_terminal:
                live.update(render(view, url, note), refresh=True)
            else:
                console.print(render(view, url, note))
                console.file.flush()


def render(view: View, url: str, note: str | None = None) -> RenderableType:
    """Return the whole screen, laid out for 80 columns and 24 lines. note: an error, shown in place of the title."""
    from rich.console import Group
    from rich.text import Text

    window = "since the start" if view.is_since_start else f"last {view.window_s:.0f} s"
    state = "ready" if view.engine["is_ready"] else "NOT READY"
    restarts = f", {view.engine['num_restarts']:.0f} restarts" if view.engine["num_restarts"] else ""
    synthetic = ", SYNTHETIC ACCEPTANCE: not the target's output" if view.engine.get("is_synthetic") else ""
    doubtful = view.engine.get("doubtful_costs", [])
    costs = f", DOUBTFUL COSTS: {', '.join(doubtful)}" if doubtful else ""
    is_well = view.engine["is_ready"] and not synthetic and not costs
    title = f"faser top  {url}  engine {state}{restarts}{synthetic}{costs}"
    return Group(
        Text(
            note or title, style="bold" if is_well and note is None else "bold red", no_wrap=True, overflow="ellipsis"
        ),
        _side_by_side("requests", _requests(view), f"steps ({view.window_s:.0f} s)", _steps(view)),
        _side_by_side(f"speculation ({window})", _acceptance(view), "drafts per pass", _verified(view)),
        _side_by_side("cache and steps", _cache(view), f"latency, ms ({window})", _latencies(view)),
    )


def _side_by_side(left_title: str, left: Table, right_title: str, right: Table) -> Table:
    from rich.rule import Rule
    from rich.table import Table

    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(Rule(left_title, align="left"), Rule(right_title, align="left"))
    table.add_row(left, right)
    return table


def _requests(view: View) -> Table:
    requests, throughput = view.requests, view.throughput
    return _pairs(
        [
            ("running", f"{_number(requests['running'])} of {_number(requests['max'])}"),
            ("reading prompts", _number(requests["context"])),
            ("waiting", _number(requests["waiting"])),
            ("ended/s", _number(requests["ended_per_s"], 1)),
            ("failed/s", _number(requests["failed_per_s"], 1)),
            ("output tokens/s", _number(throughput["generation_tokens_per_s"])),
            ("prompt tokens/s", _number(throughput["prompt_tokens_per_s"])),
        ]
    )


def _steps(view: View) -> Table:
    rows = [(part, _bar(share)) for part, share in sorted(view.steps["busy"].items())]
    rows += [("mode " + mode, _bar(share)) for mode, share in sorted(view.steps["mode"].items())]
    return _pairs(rows)


def _acceptance(view: View) -> Table:
    spec = view.speculation
    rows = [
        ("acceptance", _bar(spec["acceptance_rate"])),
        ("tokens per pass", _number(spec["mean_acceptance_length"], 2)),
        ("of oracle (rows)", _bar(spec["oracle_fraction"])),
        ("drafts/s", _number(spec["draft_tokens_per_s"])),
        ("pruned rows/s", _number(spec["pruned_rows_per_s"])),
    ]
    if len(spec["drafters"]) > 1:
        for name, found in spec["drafters"].items():
            cost_ms = _number(found["ms_per_accepted_token"], 2)
            rows.append((f"{name} ({cost_ms} ms each)", _bar(found["share"])))
    if spec["price_tokens_per_s"]:
        rows.append(("price, tokens/s", _number(spec["price_tokens_per_s"])))
    return _pairs(rows)


def _verified(view: View) -> Table:
    """Return a table whose row n has the share of passes with n drafts and how often draft n was accepted."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("n", "verified", "n-th accepted", style="dim")
    accepted = [None, *view.speculation["accepted_by_position"]]
    rows = list(zip(view.speculation["verified_by_length"], accepted, strict=False))
    last = _MAX_LENGTHS - 1
    for n, (verified, share) in enumerate(rows[: last if len(rows) > _MAX_LENGTHS else _MAX_LENGTHS]):
        table.add_row(str(n), _bar(verified), _bar(share) if n else "")
    if len(rows) > _MAX_LENGTHS:
        longer = [verified for verified, _ in rows[last:] if verified is not None]
        table.add_row(f"{last}+", _bar(sum(longer) if longer else None), "")
    return table


def _cache(view: View) -> Table:
    cache = view.cache
    return _pairs(
        [
            ("KV blocks", _bar(cache["usage"])),
            ("used", f"{_number(cache['blocks_used'])} of {_number(cache['blocks_max'])}"),
            ("tokens per block", _number(cache["tokens_per_block"])),
            ("prefix hits", _bar(cache["hit_rate"])),
            ("steps/s", _number(view.throughput["steps_per_s"])),
        ]
    )


def _latencies(view: View) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(no_wrap=True, justify="right")
    table.add_row("", "p50", "p90", "p99", style="dim")
    for name, values in view.latency_s.items():
        table.add_row(name.replace("_", " "), *(_milliseconds(v) for v in values.values()))
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _bar(share: float | None) -> str:
    if share is None:
        return "-"
    num_full = round(_BAR_WIDTH * min(max(share, 0.0), 1.0))
    return f"{'█' * num_full}{'·' * (_BAR_WIDTH - num_full)} {100 * share:3.0f}%"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else _number(1e3 * seconds, 1 if seconds < 0.1 else 0)
