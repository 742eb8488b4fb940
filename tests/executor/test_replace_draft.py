"""Another draft takes the place of the one that runs: no text changes, and what is drafted is the new one's."""

from contextlib import ExitStack

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError, FaserError, UnavailableError
from faser_trtllm.executor.factory import open_executor
from tests.support.block_drafter import make_block_drafter
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head
from tests.support.executor_harness import Collector

SIZES = {"max_seq_len": 96, "max_batch_size": 3, "max_num_tokens": 64, "max_draft_len": 4, "tokens_per_block": 16}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 60)), [9], list(range(3, 50))]
SAMPLING = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "seed": 4}, {"repetition_penalty": 1.2}]


def build(path, target, draft, **options):
    return build_engines(BuildOptions(target, draft, path, **SIZES | options)).path


def replace(executor, path):
    done = executor.replace_draft(path)
    executor.step()
    done.result(timeout=0)


def run(executor, replacements=(), prompts=PROMPTS):
    """Return tokens; replacements: (step, directory)."""
    collector = Collector()
    for index, (prompt, sampling) in enumerate(zip(prompts, SAMPLING, strict=True)):
        params = SamplingParams(max_tokens=30, **sampling)
        executor.submit(str(index), prompt, params, collector.sink(str(index)))
    waiting, step = dict(replacements), 0
    while True:
        done = executor.replace_draft(waiting.pop(step)) if step in waiting else None
        if not executor.step():
            break
        if done is not None:
            done.result(timeout=0)
        executor.check_integrity()
        step += 1
    assert not waiting, "the requests ended before"
    return collector.tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target") / "t", num_layers=3)


def drafts_of(kind, root, target):
    """Two drafts of a kind."""
    if kind == "model":
        return make_checkpoint(root / "a", num_layers=1, seed=8), target
    if kind == "eagle3":
        return [make_head(root / name, target, layers=(1, 2), seed=seed) for name, seed in (("a", 1), ("b", 2))]
    return [
        make_block_drafter(root / name, target, kind, block_size=6, seed=seed) for name, seed in (("a", 1), ("b", 2))
    ]


@pytest.mark.parametrize("kind", ["model", "eagle3", "dflash"])
def test_no_text_changes(tmp_path, target, kind):
    first, second = (
        build(tmp_path / f"e{i}", target, draft) for i, draft in enumerate(drafts_of(kind, tmp_path, target))
    )
    with open_executor(first, ExecutorConfig(num_threads=1, speculation="off")) as executor:
        plain = run(executor)
    for mode in ("serial", "draft_ahead"):
        with open_executor(first, ExecutorConfig(num_threads=1, speculation=f"fixed:4,mode={mode}")) as executor:
            assert run(executor, [(2, second), (5, first), (9, second)]) == plain
            assert executor.stats()["num_tested_drafts_model"] > 0


@pytest.mark.parametrize("in_between", [False, True])
def test_the_new_draft_knows_nothing_of_the_old_ones_kv(tmp_path, target, in_between):
    """The target drafts for itself then, so every draft passes, also after a reused prefix, unless it reads keys and
    values of the other model. in_between: requests run when it takes the place, so that cached blocks are theirs."""
    other, itself = (
        build(tmp_path / f"e{i}", target, draft) for i, draft in enumerate(drafts_of("model", tmp_path, target))
    )
    with open_executor(other, ExecutorConfig(num_threads=1, speculation="fixed:4")) as executor:
        run(executor, [(4, itself)] if in_between else [])
        if not in_between:
            replace(executor, itself)
        before = executor.stats()
        assert before["num_passed_drafts_model"] < before["num_tested_drafts_model"]
        run(executor)
        after = executor.stats()
        assert after["kv_num_reused_blocks"] > before["kv_num_reused_blocks"]
        tested, passed = (after[name] - before[name] for name in ("num_tested_drafts_model", "num_passed_drafts_model"))
        assert tested == passed > 50


def test_what_cannot_take_its_place_is_refused_and_the_old_one_goes_on(tmp_path, target):
    running = build(tmp_path / "running", target, make_head(tmp_path / "head", target, layers=(1, 2)))
    other_target = make_checkpoint(tmp_path / "other", num_layers=3, seed=5)
    refused = {
        "the target in .* is not the one that runs": build(
            tmp_path / "e1", other_target, make_head(tmp_path / "h1", other_target, layers=(1, 2))
        ),
        "is a model; it must be of the running draft's kind .eagle3.; build one": build(
            tmp_path / "e2", target, target
        ),
        "is missing; it must be of the running draft's kind .eagle3.": build(tmp_path / "e3", target, None),
        "it must read layers of this target .it reads .0, 2.., the same as a head that it replaces": build(
            tmp_path / "e4", target, make_head(tmp_path / "h4", target, layers=(0, 2))
        ),
    }
    blocks = [
        build(tmp_path / f"b{size}", target, make_block_drafter(tmp_path / f"d{size}", target, block_size=size))
        for size in (5, 6)
    ]
    with ExitStack() as stack:
        of_blocks = stack.enter_context(open_executor(blocks[0], ExecutorConfig(num_threads=1, speculation="fixed:4")))
        with pytest.raises(ConfigError, match="block_size is 6, but 5 in the engine that it is to replace"):
            replace(of_blocks, blocks[1])
        executor = stack.enter_context(open_executor(running, ExecutorConfig(num_threads=1, speculation="fixed:4")))
        plain = run(executor)
        for message, path in refused.items():
            with pytest.raises(FaserError, match=message):
                replace(executor, path)
        assert run(executor) == plain
        alone = stack.enter_context(open_executor(running, ExecutorConfig(num_threads=1, speculation="off")))
        with pytest.raises(ConfigError, match="cannot be replaced while they run"):
            alone.replace_draft(running)
    with pytest.raises(UnavailableError, match="the server is shutting down; start it again with the new draft"):
        executor.replace_draft(running)
