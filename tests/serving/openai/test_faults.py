"""Tests of the OpenAI server's effect on Triton when things go wrong: many streams that end in errors at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter

import pytest

from faser_trtllm.errors import FaserError
from faser_trtllm.serving.openai.model import Model
from tests.support.effort import pick
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.triton, pytest.mark.slow]

NUM_WORKERS = 24
NUM_KILLS = pick(1, 3)


@pytest.fixture
def server(fake_engine_dir, tmp_path):
    config = tmp_path / "faser.yaml"
    config.write_text("restart_backoff_s: 0.05\n")
    with Server(fake_engine_dir, is_fake=True, config=config, log=tmp_path / "log") as server:
        yield server.wait_ready()


async def serve_some(codes: Counter[str]) -> None:
    """Until requests of each kind, but those of a killed engine, have ended."""
    wanted = {code: codes[code] + NUM_WORKERS / 2 for code in ("length", "left", "INVALID_ARG")}
    deadline_s = time.monotonic() + PATIENCE_S
    while any(codes[code] < number for code, number in wanted.items()):
        assert time.monotonic() < deadline_s, codes
        await asyncio.sleep(0.02)


def test_triton_outlives_errors_of_many_streams_and_their_codes_arrive(server):
    """Refused requests, cancelled ones and those of a killed engine, mixed; as the parameter error_codes has them."""
    codes: Counter[str] = Counter()
    sentences: set[str] = set()

    async def work(model: Model, number: int, stop: asyncio.Event) -> None:
        for count in range(number, 10_000):
            if stop.is_set():
                return
            max_tokens = (0, 40, 300)[count % 3]
            answers = model.generate(f"{number}-{count}", "abc", {"max_tokens": max_tokens, "stream": True})
            try:
                async for delta in answers:
                    if max_tokens == 300 and count % 2 and len(delta.token_ids):
                        codes["left"] += 1
                        break
                    if delta.finish_reason is not None:
                        codes[delta.finish_reason] += 1
            except FaserError as error:
                codes[error.code] += 1
                sentences.add(str(error))
                await asyncio.sleep(0.01)
            finally:
                await answers.aclose()

    async def run() -> None:
        models = [Model(server.grpc_url) for _ in range(3)]
        stop = asyncio.Event()
        workers = [asyncio.create_task(work(models[i % 3], i, stop)) for i in range(NUM_WORKERS)]
        for _ in range(NUM_KILLS):
            await serve_some(codes)
            os.kill(server.pid_of("fake_engine"), signal.SIGKILL)
        await serve_some(codes)
        stop.set()
        await asyncio.gather(*workers)
        for model in models:
            await model.close()

    pids = server.pids()
    asyncio.run(run())
    assert server.process.poll() is None, server.output()[-2000:]
    assert server.triton_pid() in pids
    assert set(codes) == {"length", "left", "INVALID_ARG", "UNAVAILABLE"}, codes
    assert not any(sentence.startswith("[") for sentence in sentences), sentences
    assert min(codes.values()) >= NUM_WORKERS / 2, codes


def test_streams_are_read_to_their_end_so_that_triton_frees_them(server):
    """It keeps a stream that is cancelled behind its last response, and cannot stop in time."""
    ends: Counter[str] = Counter()

    async def work(model: Model) -> None:
        for max_tokens in (3, 0) * 20:
            try:
                async for delta in model.generate("1", "abc", {"max_tokens": max_tokens, "stream": True}):
                    ends[str(delta.finish_reason)] += 1
            except FaserError as error:
                ends[error.code] += 1

    async def run() -> None:
        model = Model(server.grpc_url)
        await asyncio.gather(*(work(model) for _ in range(4)))
        await model.close()

    asyncio.run(run())
    assert ends["length"] == ends["INVALID_ARG"] == 80, ends
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "Exit timeout expired" not in server.output()
