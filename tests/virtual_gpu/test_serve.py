"""`faser serve` of TensorRT engines on the virtual GPU: a real Triton, asked by tritonclient, with all of it on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from faser_trtllm.core.decision import Mode
from faser_trtllm.serving.client import GrpcClient
from tests.support.effort import pick
from tests.support.triton_server import Server
from tests.support.waiting import wait_until
from tests.virtual_gpu.__main__ import COUNTERS
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.plan_engines import build_plans, generate_texts
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = [pytest.mark.triton, pytest.mark.slow]

DRAFT, TARGET = "0+32", "32+100"  # SMs: first + number
PROMPTS = ("The", "def main(", "0, 1, 2, 3,", "hello hello")
NUM_TOKENS = 32
MAX_ROUNDS = 8  # of all prompts


@pytest.fixture(scope="module")
def engine_dir(gpu: VirtualGpuProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu.run(build_plans, tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def alone(gpu: VirtualGpuProcess, engine_dir: Path) -> dict[str, list[int]]:
    tokens = gpu.run(generate_texts, engine_dir, "off", PROMPTS, max_tokens=NUM_TOKENS).tokens
    return dict(zip(PROMPTS, tokens, strict=True))


@pytest.mark.parametrize("mode", pick([Mode.PING_PONG], list(Mode)))
def test_tokens_are_those_without_speculation(
    engine_dir: Path, alone: dict[str, list[int]], tmp_path: Path, mode: Mode
) -> None:
    """With price and pruning in every mode; both engines run where the mode says, and rows are pruned."""
    config, trace, counters = (tmp_path / name for name in ("faser.yaml", "trace.json", "counters.json"))
    config.write_text(f"trace_file: {trace}\nhealth_timeout_s: 7200\nhang_timeout_s: 7200\n")
    command = [sys.executable, "-m", "tests.virtual_gpu", "faser", "serve", "--models", "faser"]
    command += ["--speculation", f"price:mode={mode.value},prune=on", "--config", str(config)]
    with Server(engine_dir, command=command, environment={COUNTERS: str(counters)}, log=tmp_path / "log") as server:
        server.wait_ready()
        before = _written_now(counters)
        with GrpcClient(server.grpc_url) as client:
            for _ in range(MAX_ROUNDS):  # where price prunes hangs on what passes take, on a machine as busy as it is
                assert _answers(client) == alone
                wait_until(lambda: _steps(trace, mode))
                if sum(step["num_pruned_rows"] for step in _steps(trace, mode)):
                    break
        ran = _written_now(counters).since(before)
    steps = _steps(trace, mode)
    assert sum(step["num_accepted"] for step in steps) > 0
    assert sum(step["num_pruned_rows"] for step in steps) > 0
    whole, draft, target = (ran.kernels(context) for context in ("whole", DRAFT, TARGET))
    if mode is Mode.SERIAL:
        assert not draft.keys() | target.keys()
        return
    # The draw is the draft's and rejection sampling the target's: each on its own SMs.
    assert draft.keys() == {"sample_rows", "sample_advance", "set_conditional", "take_step"}
    assert target.keys() == {"accept_rows_fp32", "accept"}
    assert draft["sample_rows"] > whole.get("sample_rows", 0)
    assert ran.work[TARGET]["plan of layers 1 to 2"] > 0
    assert ran.work[TARGET].keys() | ran.work["whole"].keys() >= {"plan of the early exit"}
    assert "plan of the early exit" not in ran.work[DRAFT]


def _answers(client: GrpcClient) -> dict[str, list[int]]:
    """All prompts at once, greedy."""
    ids = {client.send(prompt, max_tokens=NUM_TOKENS, temperature=0.0, end_id=-1): prompt for prompt in PROMPTS}
    tokens: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}
    while ids:
        request_id, response = client.receive()
        tokens[ids[request_id]] += response.token_ids
        if response.is_final:
            del ids[request_id]
    return tokens


def _written_now(path: Path) -> Counters:
    """Return the counters of a write that begins after this call: the second that ends."""
    for _ in range(2):
        written = path.stat().st_ino
        wait_until(lambda last=written: path.stat().st_ino != last)
    return Counters.parse(path.read_text())


def _steps(trace: Path, mode: Mode) -> list[dict[str, int]]:
    """Return what the trace says of each verification in this mode; the last line may be cut off."""
    lines = [line.rstrip(",") for line in trace.read_text().splitlines()[1:-1]]
    events = [json.loads(line) for line in lines]
    return [event["args"] for event in events if event["name"] == "verify" and event["args"].get("mode") == mode.value]
