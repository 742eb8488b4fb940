"""The bundled EAGLE-3 head and block drafter: the target keeps most of their drafts, and its text stays the same."""

from pathlib import Path

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.prompts import draw_prompts
from tests.support.executor_harness import Collector

DEMO = Path(__file__).parents[2] / "engines" / "demo"
MAX_BYTES = 3_000_000


@pytest.fixture(params=["eagle3", "block"])
def head(request):
    return DEMO / request.param


def build(head, directory, expand=1):
    options = BuildOptions(DEMO / "target", head, directory, max_seq_len=256, expand=expand)
    return build_engines(options).path


def run(engine_dir, prompts, speculation):
    """Return tokens by request, stats."""
    collector = Collector()
    with open_executor(engine_dir, ExecutorConfig(num_threads=1, speculation=speculation)) as executor:
        for index, prompt in enumerate(prompts):
            executor.submit(str(index), prompt, SamplingParams(max_tokens=64), collector.sink(str(index)))
        while executor.step():
            pass
        return collector.tokens, executor.stats()


@pytest.fixture(scope="module")
def prompts():
    return draw_prompts(Tokenizer.load(DEMO / "target").encode, 8, 64).token_ids


def test_the_target_keeps_most_of_its_drafts(head, tmp_path, prompts):
    plain, _ = run(build(head, tmp_path / "e"), prompts, "off")
    found, stats = run(tmp_path / "e", prompts, "fixed:1")  # so that first places only are counted
    assert found == plain
    assert stats["num_tested_drafts_model"] > 100
    assert stats["num_accepted_tokens"] >= 0.6 * stats["num_tested_drafts_model"]


def test_an_expanded_target_keeps_as_many(head, tmp_path, prompts):
    """It computes the same hidden rows in more layers."""
    counts = []
    for expand in (1, 3):
        _, stats = run(build(head, tmp_path / str(expand), expand), prompts, "fixed:3")
        counts.append([stats["num_tested_drafts_model"], stats["num_accepted_tokens"]])
    assert counts[0] == counts[1]


def test_it_is_small(head):
    assert (head / "model.safetensors").stat().st_size < MAX_BYTES
