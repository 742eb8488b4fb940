from __future__ import annotations

import pytest

from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet
from tests.support.engine_harness import Harness
from tests.support.tiny_model import TinyConfig, TinyModel


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """A tiny model, of up to five requests at once."""
    path = TinyModel(TinyConfig(num_layers=2, max_seq_len=64)).write(tmp_path_factory.mktemp("e") / "rank0.engine")
    sizes = {"num_blocks": 20, "tokens_per_block": 16, "max_batch_size": 5, "max_num_tokens": 128}
    with CoreSet(num_threads=2) as core_set, CpuEngine.open(path, core_set, **sizes) as engine:
        yield Harness(engine)
