"""A draft model with a shorter context than its target: it drafts within its window, and the target goes on alone."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.policy.base import Mode
from tests.support.checkpoints import make_pair
from tests.support.eagle3 import make_head
from tests.support.executor_harness import Collector, ErraticPolicy, Setup
from tests.support.medusa import make_medusa

WINDOW, LENGTH, NUM_DRAFTS = 48, 160, 5
SIZES = {"max_seq_len": LENGTH, "max_batch_size": 3, "max_num_tokens": 64, "max_draft_len": NUM_DRAFTS}
PROMPTS = [[5, 6, 7] * 3, list(range(3, 43)), [9] * WINDOW, list(range(2, 100))]
SAMPLING = [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}, {}]


class Drafts(StepWatcher):
    """The tokens of requests with the drafts that the draft model made of them."""

    def __init__(self) -> None:
        self.ends: set[int] = set()

    def step(self, record: StepRecord) -> None:
        rows, drafts = record.plan.scheduled, record.drafts
        of_model = drafts.num_new_drafts - (0 if drafts.num_free is None else drafts.num_free)
        ends = rows.num_tokens + rows.num_pending + drafts.num_new_drafts
        self.ends |= {end for end, count in zip(ends.tolist(), of_model.tolist(), strict=True) if count}


def shorten(checkpoint: Path, length: int) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": length}))
    return checkpoint


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engines")
    target, draft = make_pair(root / "checkpoints", num_layers=2)
    drafters = {
        "pair": shorten(draft, WINDOW),
        "head": shorten(make_head(root / "eagle3", target, draft_vocab_size=None), WINDOW),
        "medusa": make_medusa(root / "heads", target),
    }
    for name, given in drafters.items():
        engines = build_engines(BuildOptions(target, given, root / name, exit_layers=(1,), **SIZES))
        assert engines is not None
        assert engines.build_config.max_seq_len == LENGTH
        assert engines.draft_window == (WINDOW if name == "pair" else None)
    return {name: root / name for name in drafters}


def texts(engine_dir: Path, mode: Mode | None = None, **config: object) -> tuple[dict[str, list[int]], Drafts, dict]:
    """mode: of drafts and pruning at random, None: as the configuration says."""
    collector, drafts = Collector(), Drafts()
    wrap = {} if mode is None else {"wrap_policy": lambda policy: ErraticPolicy(NUM_DRAFTS, 7, (mode,))}
    with open_executor(engine_dir, ExecutorConfig(num_threads=1, **config), **wrap) as executor:
        executor.watch(drafts)
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
            params = SamplingParams(max_tokens=60, **sampling)
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            executor.check_integrity()
        return collector.tokens, drafts, executor.stats()


@pytest.fixture(scope="module")
def plain(engines: dict[str, Path]) -> dict[str, list[int]]:
    found = texts(engines["pair"], speculation="off")[0]
    assert [len(found[str(index)]) for index in range(4)] == [60] * 4
    return found


@pytest.mark.parametrize("speculation", ["fixed:5", "fixed:3,mode=draft_ahead", "fixed:3,mode=ping_pong", *Mode])
@pytest.mark.parametrize("drafters", [("model",), ("suffix", "model")])
def test_drafting_ends_with_the_window_and_the_text_goes_on(engines, plain, speculation, drafters) -> None:
    is_random = isinstance(speculation, Mode)
    settings = {"mode": speculation, "speculation": "fixed:1"} if is_random else {"speculation": speculation}
    found, drafts, stats = texts(engines["pair"], drafters=drafters, **settings)
    assert found == plain
    assert max(drafts.ends) == WINDOW, "it drafts as far as it may"
    if "suffix" in drafters:
        assert stats["num_tested_drafts_suffix"] > 0


@pytest.mark.parametrize("name", ["head", "medusa"])
def test_heads_have_no_window(engines, plain, name: str) -> None:
    """EAGLE's declares the length that it was trained with."""
    found, drafts, _ = texts(engines[name], speculation="fixed:3")
    assert found == plain
    assert max(drafts.ends) > WINDOW + 50


def test_no_draft_is_made_of_a_prompt_that_fills_the_window(engines) -> None:
    collector, drafts = Collector(), Drafts()
    with open_executor(engines["pair"], ExecutorConfig(num_threads=1, speculation="fixed:5")) as executor:
        executor.watch(drafts)
        executor.submit("a", range(2, 2 + WINDOW), SamplingParams(max_tokens=20), collector.sink("a"))
        while executor.step():
            pass
        assert executor.stats()["num_draft_tokens"] == 0
    assert (collector.requests["a"].stats.num_draft_tokens, drafts.ends) == (0, set())


@pytest.fixture(scope="module")
def replaceable(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One target with drafts of several context lengths."""
    root = tmp_path_factory.mktemp("replaceable")
    target, draft = make_pair(root / "checkpoints", num_layers=2)
    lengths = (WINDOW, LENGTH, 2 * LENGTH)
    for length in lengths:
        build_engines(BuildOptions(target, shorten(draft, length), root / str(length), **SIZES))
    return {length: root / str(length) for length in lengths}


@pytest.mark.parametrize(
    ("running", "other", "is_refused"),
    [(WINDOW, LENGTH, True), (LENGTH, WINDOW, True), (LENGTH, 2 * LENGTH, False)],  # max_seq_len is LENGTH
)
def test_only_a_draft_that_drafts_as_far_takes_the_place_of_another(replaceable, running, other, is_refused) -> None:
    refusal = f"for at most {other} tokens, the running draft for {running}; build one with that context length"
    collector, drafts = Collector(), Drafts()
    with open_executor(replaceable[running], ExecutorConfig(num_threads=1, speculation="fixed:5")) as executor:
        executor.watch(drafts)
        with pytest.raises(ConfigError, match=refusal) if is_refused else nullcontext():
            done = executor.replace_draft(replaceable[other])
            executor.step()
            done.result(timeout=0)
        executor.submit("a", [5, 6, 7] * 3, SamplingParams(max_tokens=LENGTH), collector.sink("a"))
        while executor.step():
            pass
    assert max(drafts.ends) == min(running, LENGTH - 1)


@pytest.mark.parametrize("mode", list(Mode))
def test_what_only_the_window_keeps_from_drafting_takes_a_step_for_each_token(mode: Mode) -> None:
    """In ping_pong, too, where a request that is drafted for does not run."""
    steps = {}
    for policy in ("off", f"fixed:3:{mode.value}"):
        setup, collector = Setup(policy=policy, draft_window=8), Collector()
        with setup.open() as executor:
            for name in "abc":
                executor.submit(name, [1] * 8, SamplingParams(max_tokens=20), collector.sink(name))
            steps[policy] = 0
            while executor.step():
                steps[policy] += 1
    assert len(set(steps.values())) == 1, steps
