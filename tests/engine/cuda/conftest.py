"""Engines that several files' tests open."""

from __future__ import annotations

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from tests.engine.cuda.harness import build_pair
from tests.engine.cuda.host_executor import generate, mixed_requests
from tests.support.effort import pick


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300, hidden_size=32)


@pytest.fixture(scope="module", params=pick([True], [False, True]), ids=pick(["edited"], ["plain", "edited"]))
def alone(request: pytest.FixtureRequest, engines: EngineDir):
    """Requests, and their tokens without speculation, one request at a time."""
    requests = mixed_requests(request.param)
    return requests, generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)[0]
