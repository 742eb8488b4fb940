"""Drafters on real engines: the text is the target's, whoever drafts, and a target alone speculates for nothing."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import DrafterName, ExecutorConfig, KvCacheConfig, SchedulerConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import choose_drafters, open_executor
from tests.support.checkpoints import make_pair
from tests.support.eagle3 import make_head
from tests.support.effort import pick
from tests.support.executor_harness import Collector
from tests.support.moe_checkpoints import make_moe_pair

SIZES = {"max_seq_len": 96, "max_batch_size": 3, "max_num_tokens": 64, "max_draft_len": 5}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 40)), [9, 9, 9], [4, 8, 15, 4, 8]]
SAMPLING = [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}, {"temperature": 1.2, "seed": 4}]


MODELS = ["dense", "qwen3_moe", "mixtral", "gpt_oss"]


@pytest.fixture(scope="module", params=MODELS)
def engines(request, tmp_path_factory):
    """ "pair", "head" and "alone": the same target with a draft model, with an EAGLE-3 head and without."""
    root, options = tmp_path_factory.mktemp("engines"), dict(SIZES)
    if request.param == "dense":
        target, draft = make_pair(root / "checkpoints", num_layers=2)
    else:
        is_gpt_oss = request.param == "gpt_oss"
        options["quantization"] = "mxfp4" if is_gpt_oss else "none"
        # Of a model whose text repeats itself.
        target, draft = make_moe_pair(root / "checkpoints", request.param, num_layers=2, seed=5 if is_gpt_oss else 0)
    head = make_head(root / "eagle3", target, draft_vocab_size=None)
    return {
        name: build_engines(BuildOptions(target, given, root / name, exit_layers=(1,), **options)).path
        for name, given in (("pair", draft), ("head", head), ("alone", None))
    }


def texts(engine_dir, **config):
    """Return tokens of all prompts at once, stats."""
    collector = Collector()
    with open_executor(engine_dir, ExecutorConfig(num_threads=1, **config)) as executor:
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
            params = SamplingParams(max_tokens=50, **sampling)
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            executor.check_integrity()
        return collector.tokens, executor.stats()


@pytest.fixture(scope="module")
def plain(engines):
    return texts(engines["pair"], speculation="off")[0]


@pytest.mark.parametrize(
    "speculation", pick(["fixed:5", "fixed:3,mode=draft_ahead"], ["fixed:1", "fixed:3,mode=ping_pong"])
)
@pytest.mark.parametrize("drafters", [("suffix",), ("suffix", "model"), ("model",)])
def test_the_text_is_the_targets_own(engines, plain, speculation, drafters):
    found, stats = texts(engines["pair"], speculation=speculation, drafters=drafters)
    assert found == plain
    if "suffix" in drafters:
        assert stats["num_passed_drafts_suffix"] > 0


NUM_SAMPLES = pick(1000, 6000)


def sample(engine_dir, speculation, drafters):
    """Return counts of the first three tokens of NUM_SAMPLES texts without a seed, and the
    executor's statistics. The keys are fixed, one set for each
    speculation, so the outcome is too."""
    keys = np.random.default_rng(len(speculation))
    collector, params = Collector(), SamplingParams(max_tokens=5, temperature=2.0, top_k=2, end_ids=())
    config = {"speculation": speculation, "drafters": drafters, "max_queue_size": NUM_SAMPLES}
    with (
        mock.patch("os.urandom", keys.bytes),
        open_executor(engine_dir, ExecutorConfig(num_threads=1, **config)) as executor,
    ):
        for index in range(NUM_SAMPLES):
            executor.submit(str(index), PROMPTS[0], params, collector.sink(str(index)))
        while executor.step():
            pass
        return Counter(tuple(tokens[:3]) for tokens in collector.tokens.values()), executor.stats()


@pytest.fixture(scope="module")
def plain_samples(engines):
    return sample(engines["pair"], "off", ("model",))[0]


@pytest.mark.parametrize("engines", pick(["dense", "gpt_oss"], MODELS), indirect=True)
@pytest.mark.parametrize("drafters", [("model",), ("suffix", "model")])
def test_unseeded_samples_have_the_targets_law(engines, plain_samples, drafters):
    """Chi-square of the first three tokens against speculation off."""
    plain, found = plain_samples, sample(engines["pair"], "fixed:3", drafters)
    assert 0 < found[1]["num_accepted_tokens"] < found[1]["num_draft_tokens"]
    texts = sorted(text for text, count in plain.items() if count + found[0][text] >= 20)
    assert len(texts) > 3
    counts = [[drawn[text] for text in texts] for drawn in (plain, found[0])]
    assert stats.chi2_contingency(counts).pvalue > 1e-3


@pytest.mark.parametrize("speculation", ["off", "fixed:4"])
def test_blocks_that_are_reused_and_taken_away_change_no_text(engines, speculation):
    """Prompts with a common beginning, more of them than the KV cache holds."""
    common, rows = list(range(3, 40)), [[50 + i, 60 + i] for i in range(6)]

    def run(max_tokens, one_by_one):
        config = {"speculation": speculation, "kv_cache_config": KvCacheConfig(max_tokens=max_tokens)}
        config["scheduler_config"] = SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION")
        collector = Collector()
        with open_executor(engines["pair"], ExecutorConfig(num_threads=1, **config)) as executor:
            for index, row in enumerate(rows):
                executor.submit(str(index), common + row, SamplingParams(max_tokens=40), collector.sink(str(index)))
                while one_by_one and executor.step():
                    pass
            while executor.step():
                executor.check_integrity()
            return collector.tokens, executor.stats()

    plain, counts = run(3 * 96, True)
    assert counts["kv_num_reused_blocks"] > 0
    found, counts = run(128, False)
    assert found == plain
    assert counts["num_preemptions"] > 0


@pytest.mark.parametrize("speculation", ["fixed:4", "fixed:3,mode=draft_ahead"])
@pytest.mark.parametrize(("drafter", "num_branches"), [("pair", 1), ("pair", 3), ("head", 2)])
def test_a_token_tree_changes_no_text(engines, plain, drafter, speculation, num_branches):
    """A head also needs the target's hidden row of a branch that was right."""
    found, stats = texts(engines[drafter], speculation=speculation, num_branches=num_branches)
    assert found == plain
    assert (stats["num_branch_rows"] > 0) == (speculation == "fixed:4")


def test_a_target_alone_speculates_for_nothing(engines, plain):
    found, stats = texts(engines["alone"])
    assert found == plain
    assert stats["num_passed_drafts_suffix"] > 0
    assert stats["num_steps"] < texts(engines["alone"], speculation="off")[1]["num_steps"]


def test_the_default_is_what_the_engines_have(engines):
    pair, alone = (EngineDir.load(engines[name]) for name in ("pair", "alone"))
    assert choose_drafters(pair, ExecutorConfig()) == (DrafterName.MODEL,)
    assert choose_drafters(alone, ExecutorConfig()) == (DrafterName.SUFFIX,)
    with pytest.raises(ConfigError, match="no draft engine; set it to"):
        choose_drafters(alone, ExecutorConfig(drafters=("suffix", "model")))
