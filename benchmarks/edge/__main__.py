"""Measure the CPU time of a streamed response.

Starts a server several times, streams greedy requests to a client that only counts (light_client.py), and prints a
Markdown table with CPU us per response of each process, responses per second, and ms per token of a stream. Numbers
depend on the machine: compare two versions by alternating runs. With `--fake` the engine process is the tests' one,
whose executor computes nothing; with `--sleeping` the real executor runs a target that sleeps (sleeping_engine.py), so
that ms per token are those of a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.edge.light_client import run_streams
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions, default_repository
from faser_trtllm.serving.launch.process import session_pids

PROMPT = "def quicksort(items):"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_ERROR_TAG = b"\x0a"  # field 1 of ModelStreamInferResponse
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True, slots=True)
class Sample:
    """Responses, time, and CPU seconds of each process in one run."""

    num_responses: int
    seconds: float
    cpu_s: dict[str, float]

    def us(self, part: str) -> float:
        return 1e6 * self.cpu_s[part] / self.num_responses


def request_bytes(max_tokens: int, stop_word: bytes | None = None) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="faser")
    texts = {"text_input": PROMPT.encode()} | ({} if stop_word is None else {"stop_words": stop_word})
    for name, datatype, content in (
        *((name, "BYTES", len(text).to_bytes(4, "little") + text) for name, text in texts.items()),
        ("max_tokens", "INT32", max_tokens.to_bytes(4, "little", signed=True)),
        ("end_id", "INT32", (2**32 - 1).to_bytes(4, "little")),
        ("stream", "BOOL", b"\x01"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(content)
    return bytes(request.SerializeToString())


def run_grpcio(port: int, num_streams: int, request: bytes) -> int:
    """Run light_client.run_streams() with gRPC's library, without protobuf's objects."""
    counts = [0] * num_streams
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

        def read(place: int) -> None:
            for response in channel.stream_stream(_STREAM)(iter([request]), timeout=300):
                if response.startswith(_ERROR_TAG):
                    raise RuntimeError(service_pb2.ModelStreamInferResponse.FromString(response).error_message)
                counts[place] += 1

        with ThreadPoolExecutor(num_streams) as readers:
            list(readers.map(read, range(num_streams)))
    return sum(counts)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def parts_of(server_pid: int) -> dict[str, int]:
    """Return the process ids of a launch by part."""
    (engine_pid,) = (pid for pid in session_pids(server_pid) if pid != server_pid)
    return {"tritonserver": server_pid, "engine": engine_pid}


def measure(options: argparse.Namespace) -> Sample:
    """Measure one launch after a warm-up with a tenth of the tokens."""
    ports: dict[str, Any] = {"http_port": 18100, "grpc_port": 18101, "metrics_port": 18102}
    is_fake = options.fake or options.sleeping
    repository = default_repository() if is_fake else None  # a named one needs no engines
    interval = int(options.stream_interval) if options.stream_interval.isdecimal() else options.stream_interval
    serve = ServeOptions(
        engine_dir=options.engine_dir,
        model_repo=repository,
        log_file=Path(os.devnull),
        settings={"stream_interval": interval},
        speculation=getattr(options, "speculation", None),
        **ports,
    )
    with Launcher(serve) as launcher:
        launcher.start()
        launcher.wait_ready()
        assert launcher.pid is not None
        parts = parts_of(launcher.pid)
        run = run_grpcio if options.grpcio else run_streams
        stop_word = b"~~" if options.stop_words else None
        run(ports["grpc_port"], options.streams, request_bytes(max(1, options.max_tokens // 10), stop_word))
        before = {part: cpu_s(pid) for part, pid in parts.items()}
        started_s, client_s = time.monotonic(), time.process_time()
        num_responses = run(ports["grpc_port"], options.streams, request_bytes(options.max_tokens, stop_word))
        seconds = time.monotonic() - started_s
        spent = {part: cpu_s(pid) - before[part] for part, pid in parts.items()}
        spent["client"] = time.process_time() - client_s
        launcher.stop()
    return Sample(num_responses, seconds, spent)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench edge", description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument(
        "--fake", action="store_true", help="use the tests' engine process; --engine_dir needs only a tokenizer"
    )
    parser.add_argument(
        "--sleeping", action="store_true", help="like --fake, with the real executor and a target that sleeps"
    )
    parser.add_argument(
        "--step_ms", type=float, default=10.0, help="ms between steps (--fake) or of a pass (--sleeping)"
    )
    parser.add_argument("--stop_words", action="store_true", help="send a stop word that does not occur")
    parser.add_argument("--grpcio", action="store_true", help="use gRPC's Python library as the client")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max_tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream_interval", default="1", help="steps between two responses, or auto")
    options = parser.parse_args(argv)
    if options.fake or options.sleeping:
        module = "benchmarks.edge.sleeping_engine" if options.sleeping else "tests.support.fake_engine"
        os.environ["FASER_ENGINE_MODULE"] = module
        os.environ["FASER_FAKE_STEP_S"] = str(1e-3 * options.step_ms)
    runs = [measure(options) for _ in range(options.rounds)]
    parts = ("tritonserver", "engine", "client")
    cells = [f"{statistics.median(run.us(part) for run in runs):.0f}" for part in parts]
    rate = statistics.median(run.num_responses / run.seconds for run in runs)
    token_ms = statistics.median(1e3 * run.seconds / options.max_tokens for run in runs)
    print(f"| {' | '.join(parts)} | responses/s | ms/token |\n|---|---|---|---|---|")
    print(f"| {' | '.join(cells)} | {rate:.0f} | {token_ms:.1f} |")


if __name__ == "__main__":
    main()
