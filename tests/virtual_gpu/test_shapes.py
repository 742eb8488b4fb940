"""No row count is seen first while the cuda backend serves: each was run at start-up, by target and draft."""

from __future__ import annotations

import random

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.sampling_params import SamplingParams
from tests.engine.cuda.harness import build_pair
from tests.support.effort import pick
from tests.virtual_gpu.process import VirtualGpuProcess
from tests.virtual_gpu.shapes import Served, serve

pytestmark = pytest.mark.slow

LIMITS = {"max_num_tokens": 90, "max_seq_len": 128, "num_blocks": 16}


def _requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of random lengths that come as others end, so that passes have any number of rows."""
    chance = random.Random(5)
    return [
        (
            [chance.randrange(2, 290) for _ in range(chance.randint(1, 100))],
            SamplingParams(max_tokens=chance.randint(2, 6), temperature=0.7 * (i % 2), seed=i, end_ids=()),
        )
        for i in range(count)
    ]


REQUESTS = _requests(pick(8, 24))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=300, num_layers=2)


@pytest.fixture(scope="module")
def as_they_are(gpu: VirtualGpuProcess, engines: EngineDir) -> Served:
    return gpu.run(serve, engines, "fixed:3", REQUESTS, is_padded=False, **LIMITS)


@pytest.mark.parametrize(
    ("policy", "has_graphs"),
    [("fixed:3", True), ("erratic", False), *pick([], [("fixed:3:draft_ahead", False), ("erratic", True)])],
)
def test_every_shape_was_run_at_start_up(
    gpu: VirtualGpuProcess, engines: EngineDir, as_they_are: Served, policy: str, has_graphs: bool
) -> None:
    """This holds whether graphs have memory or not, and padding changes no token."""
    padded = gpu.run(serve, engines, policy, REQUESTS, has_graphs=has_graphs, **LIMITS)
    assert padded.first_seen == set()
    assert padded.num_launched > 0, "logits of large passes, at least, are launched one by one"
    assert padded.tokens == as_they_are.tokens


def test_without_padding_shapes_are_first_seen(as_they_are: Served) -> None:
    """So the other test can tell."""
    rows = {shape[2][0] for shape in as_they_are.first_seen}
    assert len(rows) > 5
