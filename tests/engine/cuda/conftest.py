"""Engines that several files' tests open."""

from __future__ import annotations

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from tests.engine.cuda.harness import build_pair


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300, hidden_size=32)
