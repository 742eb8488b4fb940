"""The demo: build the bundled pair, serve it behind a real Triton, stream text, measure, and clean up.

Run by `./build.sh demo`, or `python -m faser_trtllm.serving.demo`.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.serving.client import GrpcClient, Response, stream_http
from faser_trtllm.serving.launcher import Launcher
from faser_trtllm.serving.serve_options import ServeOptions

ROOT = Path(__file__).resolve().parents[2]
PAIR_DIR = ROOT / "engines" / "demo"
BUILT_DIR = ROOT / "engines" / "built"
EXPAND = 4
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "class Cache:\n    def __init__(self, maxsize):\n",
    "import os\nimport sys\n\ndef main():\n",
    "class TestParser(unittest.TestCase):\n    def test_empty(self):\n",
)
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _Run:
    """Answers of all prompts, one after the other."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    num_drafts: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main(argv: list[str] | None = None) -> int:
    """0 if all went well and nothing was left behind."""
    parser = argparse.ArgumentParser(prog="./build.sh demo", description="serve the bundled pair and stream text")
    parser.add_argument("--max_tokens", type=int, default=96, help="tokens of each answer (default: 96)")
    parser.add_argument("--speculation", default="fixed:4", help="off or fixed:K (default: fixed:4)")
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
    http_port, grpc_port, metrics_port = _free_ports()
    log_file = BUILT_DIR / "demo.log"
    options = ServeOptions(
        engine_dir=engine_dir,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        speculation=speculation,
        log_file=log_file,
    )
    with Launcher(options) as launcher:
        started_s = time.monotonic()
        launcher.start()
        launcher.wait_ready()
        print(
            f"Triton is ready after {time.monotonic() - started_s:.1f} s: "
            f"http://127.0.0.1:{http_port}, gRPC 127.0.0.1:{grpc_port}"
        )
        fields = SAMPLING | {"max_tokens": max_tokens}
        with GrpcClient(f"127.0.0.1:{grpc_port}") as client:
            _show("gRPC stream (tritonclient)", PROMPTS[0], client.stream(PROMPTS[0], **fields))
            url = f"http://127.0.0.1:{http_port}"
            _show(
                "HTTP generate_stream (server-sent events)",
                PROMPTS[1],
                stream_http(url, PROMPTS[1], **fields),
            )
            _compare(client, speculation, fields)
        launcher.stop()
        left = launcher.leftovers()
    if left:
        print(f"\nstopped, but left behind: {', '.join(left)}", file=sys.stderr)
        return 1
    print("\nstopped: no process, port or shared memory left behind")
    print(f"to serve it yourself: faser serve --engine_dir {engine_dir.relative_to(ROOT)}")
    return 0


def _build() -> Path:
    target, draft, output = PAIR_DIR / "target", PAIR_DIR / "draft", BUILT_DIR / f"demo-x{EXPAND}"
    if not target.is_dir():
        raise InvalidArgumentError("the demo needs the checkpoints in engines/demo; run it from a checkout")
    started_s = time.monotonic()
    BUILT_DIR.mkdir(parents=True, exist_ok=True)
    build_engines(BuildOptions(target, draft, output, expand=EXPAND, force=True))
    print(
        f"engines: {output.relative_to(ROOT)} ({time.monotonic() - started_s:.1f} s)\n"
        "  a pair trained on Python;"
        f" the target runs {EXPAND} times its layers (the same function, with the work of a larger model)"
    )
    return output


def _show(title: str, prompt: str, responses: Iterable[Response]) -> None:
    print(f"\n{title}\n{'-' * len(title)}\n{prompt}", end="", flush=True)
    num_responses = 0
    final = Response("", ())
    for final in responses:
        num_responses += 1
        print(final.text, end="", flush=True)
    drafts, accepted = final.num_draft_tokens or 0, final.num_accepted_tokens or 0
    share = f", {100 * accepted / drafts:.0f}% of {drafts} draft tokens accepted" if drafts else ""
    print(f"\n[{final.num_output_tokens} tokens in {num_responses} responses{share}]")


def _compare(client: GrpcClient, speculation: str, fields: dict[str, Any]) -> None:
    """Speculation off and on by turns, so that a change of the machine's speed hits both."""
    off_fields = fields | {"num_draft_tokens": 0}
    _measure(client, fields)
    runs = [(_measure(client, off_fields), _measure(client, fields)) for _ in range(NUM_ROUNDS)]
    off, on = ([pair[i] for pair in runs] for i in (0, 1))
    speed_off, speed_on = (statistics.median(run.tokens_per_second for run in side) for side in (off, on))
    drafts, accepted = sum(run.num_drafts for run in on), sum(run.num_accepted for run in on)
    same = all(run.token_ids == off[0].token_ids for run in [*off, *on])
    title = f"Tokens per second, {len(PROMPTS)} prompts one at a time, median of {NUM_ROUNDS}"
    print(f"\n{title}\n{'-' * len(title)}")
    print(f"{'speculation off':<18} {speed_off:7.0f}")
    accepted_share = f"{100 * accepted / drafts:.0f}% of draft tokens accepted" if drafts else "nothing drafted"
    print(f"{speculation:<18} {speed_on:7.0f}   {speed_on / speed_off:.2f}x, {accepted_share}")
    if not same:
        raise FaserError("speculation changed the tokens of a seeded request; this is a bug, please report it")
    print("the tokens are the same with and without speculation")


def _measure(client: GrpcClient, fields: dict[str, Any]) -> _Run:
    token_ids, num_drafts, num_accepted = [], 0, 0
    started_s = time.perf_counter()
    for prompt in PROMPTS:
        (answer,) = client.stream(prompt, stream=False, exclude_input_in_output=True, **fields)
        token_ids.append(answer.token_ids)
        num_drafts += answer.num_draft_tokens or 0
        num_accepted += answer.num_accepted_tokens or 0
    return _Run(time.perf_counter() - started_s, tuple(token_ids), num_drafts, num_accepted)


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
