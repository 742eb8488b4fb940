"""The demo: build the bundled pair, serve it with Triton, stream text, measure, and clean up.

Run it with `./build.sh demo` or `python examples/demo.py`.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.fingerprint import load_costs
from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from faser_trtllm.profiling.ensure import measure_once
from faser_trtllm.serving.client import GrpcClient, Response, stream_http
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.observe.view import View, fetch, make_view

ROOT = Path(__file__).resolve().parents[1]
PAIR_DIR = ROOT / "engines" / "demo"
BUILT_DIR = ROOT / "engines" / "built"
LOG = BUILT_DIR / "demo.log"
EXPAND = 16  # makes passes take milliseconds, as with real models, and longer than the host's work in a step
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "class Cache:\n    def __init__(self, maxsize):\n",
    "import os\nimport sys\n\ndef main():\n",
    "class TestParser(unittest.TestCase):\n    def test_empty(self):\n",
)
OFF = "off"
MIN_ROUNDS, MAX_ROUNDS = 3, 9
MEASURE_S = 24.0  # after this time no further round begins
METRICS_PERIOD_S = 1.2  # a little longer than the period in which the service publishes metrics
GREEN, RESET = "\033[32m", "\033[0m"


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to all prompts, which ran one after the other."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    num_drafts: int
    num_accepted: int

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True, slots=True)
class _Service:
    """A server that is ready. It also serves requests with num_draft_tokens 0, which is the same as speculation off."""

    launcher: Launcher
    http_url: str
    grpc_url: str
    metrics_url: str


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 if it succeeded and no process or port is left."""
    parser = argparse.ArgumentParser(prog="./build.sh demo", description="serve the bundled pair and stream text")
    parser.add_argument("--max_tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument(
        "--speculation", default="fixed:4", help="what to compare with off and price (default: fixed:4)"
    )
    args = parser.parse_args(argv)
    try:
        return run(args.max_tokens, args.speculation)
    except FaserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(max_tokens: int, speculation: str) -> int:
    engine_dir = _build()
    fields = SAMPLING | {"max_tokens": max_tokens}
    with ExitStack() as stack:
        fixed, price = _serve(engine_dir, (speculation, "price"), stack)
        with GrpcClient(fixed.grpc_url) as to_fixed, GrpcClient(price.grpc_url) as to_price:
            screen = Screen(Tokenizer.load(engine_dir), colored=wants_color())
            asked = fields | {"return_is_draft": screen.colored}
            screen.show(f"gRPC stream (tritonclient), {speculation}", PROMPTS[0], to_fixed.stream(PROMPTS[0], **asked))
            answers = stream_http(price.http_url, PROMPTS[1], **asked)
            screen.show("HTTP generate_stream (server-sent events), price", PROMPTS[1], answers)
            sides = {
                OFF: (to_fixed, fields | {"num_draft_tokens": 0}),
                speculation: (to_fixed, fields),
                "price": (to_price, fields),
            }
            for client, side_fields in sides.values():  # price learns costs and acceptance of drafts
                _measure(client, side_fields)
            time.sleep(METRICS_PERIOD_S)
            before = fetch(price.metrics_url)
            runs = _compare(sides)
            time.sleep(METRICS_PERIOD_S)
            for line in report(runs):
                print(line)
            print(_choice(make_view(fetch(price.metrics_url), before), engine_dir))
        left = []
        for service in (fixed, price):
            service.launcher.stop()
            left += service.launcher.leftovers()
    if left:
        print(f"\nstopped, but not removed: {', '.join(left)}", file=sys.stderr)
        return 1
    kept = f"{engine_dir.relative_to(ROOT)} (engines) and {LOG.relative_to(ROOT)}"
    print(f"\nstopped: no process, port or temporary file is left; kept are {kept}")
    print(f"to serve it yourself: faser serve --engine_dir {engine_dir.relative_to(ROOT)}")
    return 0


def _build() -> Path:
    target, draft, output = PAIR_DIR / "target", PAIR_DIR / "draft", BUILT_DIR / f"demo-x{EXPAND}"
    if not target.is_dir():
        raise InvalidArgumentError("the demo needs the checkpoints in engines/demo; run it from a checkout")
    started_s = time.monotonic()
    BUILT_DIR.mkdir(parents=True, exist_ok=True)
    build_engines(BuildOptions(target, draft, output, expand=EXPAND))
    measure_once(output)
    print(
        f"engines and their costs: {output.relative_to(ROOT)} ({time.monotonic() - started_s:.1f} s)\n"
        "  a toy pair of 7 and 1 million parameters trained on Python: its text is poor, its speed is what is shown;\n"
        f"  the target runs {EXPAND} times its layers (the same function, with the work of a larger model)"
    )
    return output


def _serve(engine_dir: Path, speculations: tuple[str, ...], stack: ExitStack) -> list[_Service]:
    """Start a server for each policy, and return them once all are ready; the stack ends them."""
    started_s = time.monotonic()
    services = []
    for speculation in speculations:
        http_port, grpc_port, metrics_port = _free_ports()
        options = ServeOptions(
            engine_dir=engine_dir,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            speculation=speculation,
            log_file=LOG,
        )
        launcher = stack.enter_context(Launcher(options))
        launcher.start()
        urls = f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{metrics_port}/metrics"
        services.append(_Service(launcher, *urls))
    for service in services:
        service.launcher.wait_ready()
    print(f"Triton is ready after {time.monotonic() - started_s:.1f} s:")
    for speculation, service in zip(speculations, services, strict=True):
        print(f"  speculation {speculation}: {service.http_url}, gRPC {service.grpc_url}")
    return services


def wants_color() -> bool:
    """Return True if standard output is a terminal and colors are not turned off (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Prints answers as they arrive, with accepted draft tokens in green if colors are on."""

    def __init__(self, tokenizer: Tokenizer, colored: bool) -> None:
        self.colored = colored
        self._tokenizer = tokenizer

    def show(self, title: str, prompt: str, responses: Iterable[Response]) -> None:
        print(f"\n{title}\n{'-' * len(title)}")
        if self.colored:
            print(f"{GREEN}green: drafted and accepted{RESET}, the rest is the target's own")
        print(prompt, end="", flush=True)
        detokenizer = IncrementalDetokenizer(self._tokenizer, before=self._tokenizer.encode(prompt))
        num_responses = 0
        final = Response("", ())
        for final in responses:
            num_responses += 1
            text = "".join(self._pieces(final, detokenizer)) if self.colored else final.text
            print(text, end="", flush=True)
        if self.colored:
            print(detokenizer.finish(), end="")
        drafts, accepted = final.num_draft_tokens or 0, final.num_accepted_tokens or 0
        share = f", {100 * accepted / drafts:.0f}% of {drafts} draft tokens accepted" if drafts else ""
        print(f"\n[{final.num_output_tokens} tokens in {num_responses} responses{share}]")

    def _pieces(self, response: Response, detokenizer: IncrementalDetokenizer) -> Iterator[str]:
        for token, is_draft in zip(response.token_ids, response.is_draft, strict=True):
            piece = detokenizer.push([token])
            yield f"{GREEN}{piece}{RESET}" if is_draft else piece


def _compare(sides: dict[str, tuple[GrpcClient, dict[str, Any]]]) -> dict[str, list[Run]]:
    """Run all sides in every round in rotating order, so that changes of the machine's speed affect them equally.

    Each round has its own seed, since for a single text some draft length would win by chance.
    """
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    names = list(sides)
    deadline_s = time.monotonic() + MEASURE_S
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.monotonic() > deadline_s:
            break
        for name in names:
            client, fields = sides[name]
            runs[name].append(_measure(client, fields | {"seed": fields["seed"] + number}))
        names.append(names.pop(0))
    return runs


def report(runs: dict[str, list[Run]]) -> Iterator[str]:
    """Yield the lines of the comparison, with medians over rounds; raise FaserError if tokens differ between sides."""
    off = runs[OFF]
    title = f"Tokens per second, {len(PROMPTS)} prompts one at a time, median of {len(off)} rounds"
    yield f"\n{title}\n{'-' * len(title)}"
    for name, side in runs.items():
        speed = statistics.median(run.tokens_per_second for run in side)
        ratio = statistics.median(
            run.tokens_per_second / base.tokens_per_second for run, base in zip(side, off, strict=True)
        )
        drafts, accepted = sum(run.num_drafts for run in side), sum(run.num_accepted for run in side)
        share = f"{100 * accepted / drafts:.0f}% of {drafts} draft tokens accepted" if drafts else "nothing drafted"
        yield f"{name:<12} {speed:7.0f}   {ratio:.2f}x   {share}"
    if any(run.token_ids != base.token_ids for side in runs.values() for run, base in zip(side, off, strict=True)):
        raise FaserError("speculation changed the tokens of a seeded request; this is a bug, please report it")
    yield "the tokens are the same with and without speculation"


def _choice(view: View, engine_dir: Path) -> str:
    """Describe how price chose drafts, and the costs that it used."""
    costs = load_costs(engine_dir, len(os.sched_getaffinity(0)))
    assert costs is not None
    context = statistics.mean(map(len, PROMPTS)) / 3 + 32  # about the middle of an answer
    alone_ms, draft_ms = costs.decode_ms(1, context), costs.draft_step_ms(1, context)
    step_ms = {n: costs.verify_ms(1 + n, 1, context) + n * draft_ms for n in (1, 4)}
    speculation = view.speculation
    return describe_choice(speculation["verified_by_length"], speculation["mean_acceptance_length"], alone_ms, step_ms)


def describe_choice(
    shares: list[float | None], tokens_per_step: float | None, alone_ms: float, step_ms: dict[int, float]
) -> str:
    """Describe choices and costs. shares, step_ms: by the number of drafts. tokens_per_step: in steps with drafts."""
    chosen = [f"{n or 'none'} in {100 * share:.0f}%" for n, share in enumerate(shares) if share and share >= 0.005]
    costs = " and ".join(f"{ms / alone_ms:.1f} times that with {n}" for n, ms in step_ms.items())
    gain = "" if tokens_per_step is None else f"; steps with drafts brought {tokens_per_step:.1f} tokens"
    return (
        f"price chose its drafts per step: {', '.join(chosen) or 'none in 100%'}{gain}; by the cost table a step takes "
        f"{alone_ms:.1f} ms without drafts, {costs}"
    )


def _measure(client: GrpcClient, fields: dict[str, Any]) -> Run:
    token_ids, num_drafts, num_accepted = [], 0, 0
    started_s = time.perf_counter()
    for prompt in PROMPTS:
        (answer,) = client.stream(prompt, stream=False, exclude_input_in_output=True, **fields)
        token_ids.append(answer.token_ids)
        num_drafts += answer.num_draft_tokens or 0
        num_accepted += answer.num_accepted_tokens or 0
    return Run(time.perf_counter() - started_s, tuple(token_ids), num_drafts, num_accepted)


def _free_ports() -> list[int]:
    sockets = [socket.socket() for _ in range(3)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


if __name__ == "__main__":
    sys.exit(main())
