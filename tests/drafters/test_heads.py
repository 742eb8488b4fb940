"""A draft head drafts for a real target, a mixture of experts too: the text is the target's own, whatever happens to
requests meanwhile."""

import functools
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig, KvCacheConfig, SchedulerConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.opening import OpenRequest, open_draft
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.executor.factory import choose_drafters, open_executor
from faser_trtllm.fingerprint import load_costs
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.registry import needs_costs
from faser_trtllm.profiling import profile
from faser_trtllm.profiling.ensure import measure_once
from lab.interpreted.open import Interpretation
from tests.support.block_drafter import make_block_drafter
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head, make_speculators_head
from tests.support.effort import EVERYTHING
from tests.support.executor_harness import Collector
from tests.support.medusa import make_medusa
from tests.support.moe_checkpoints import make_moe_checkpoint
from tests.support.mtp import make_mimo
from tests.support.networks import load_trt

SIZES = {"max_seq_len": 96, "max_batch_size": 3, "max_num_tokens": 64, "max_draft_len": 5, "tokens_per_block": 16}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 60)), [9], [4, 8, 15, 4, 8], list(range(3, 50))]
SAMPLING = [{}, {"temperature": 0.8, "seed": 3}, {}, {"temperature": 1.2, "seed": 4}, {"repetition_penalty": 1.2}]


HEADS = ["eagle3", "eagle31", "medusa", "mtp", "dflash", "dflash2", "dspark"]
OF_EACH_KIND = ["eagle3", "medusa", "mtp", "dflash"]
OF_MIXTURES = ["eagle3 of a mixture", "eagle31 of a mixture", "medusa of a mixture", "dflash of a mixture"]


@pytest.fixture(scope="module")
def engines_of(tmp_path_factory):
    """Builds a target with a draft, profiled, so that every policy can be opened: once, in any order of the tests."""

    @functools.cache
    def build(name):
        root = tmp_path_factory.mktemp("engines")
        kind, _, is_mixture = name.partition(" ")
        is_mtp = kind == "mtp"
        make_target = make_mimo if is_mtp else make_moe_checkpoint if is_mixture else make_checkpoint
        target = make_target(root / "target", num_layers=4)
        heads = {
            "eagle3": lambda: make_head(root / "head", target, layers=(1, 2, 4), draft_vocab_size=200),
            "eagle31": lambda: make_speculators_head(
                root / "head", target, layers=(1, 2, 4), num_layers=2, norm_before_fc=True, norm_output=True
            ),
            "medusa": lambda: make_medusa(root / "head", target, num_heads=SIZES["max_draft_len"]),
            "mtp": lambda: None,
            "model": lambda: make_checkpoint(root / "draft", "qwen3", num_layers=1),
        }
        make = heads.get(kind, lambda: make_block_drafter(root / "head", target, kind, block_size=6))
        options = BuildOptions(target, make(), root / "built", exit_layers=(2,), mtp=is_mtp, **SIZES)
        engines = build_engines(options)
        with mock.patch.object(profile, "QUICK_BUDGET_S", 0.05):
            measure_once(engines.path, num_threads=1)
        return engines.path

    return build


@pytest.fixture(params=[*HEADS, *OF_MIXTURES, "model of a mixture"])
def built(request, engines_of):
    return engines_of(request.param)


def texts(engine_dir, cancel_after=None, **config):
    """Return tokens of all prompts at once, stats; cancel_after: steps after which the second request is cancelled."""
    collector, num_steps = Collector(), 0
    with open_executor(engine_dir, ExecutorConfig(num_threads=1, **config)) as executor:
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
            params = SamplingParams(max_tokens=30, **sampling)
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            executor.check_integrity()
            num_steps += 1
            if num_steps == cancel_after:
                executor.cancel("1")
        collector.num_preemptions = sum(r.stats.num_preemptions for r in collector.requests.values())
        return collector, executor.stats()


@functools.cache
def tokens_alone(engine_dir):
    return texts(engine_dir, speculation="off")[0].tokens


@pytest.fixture
def plain(built):
    return tokens_alone(built)


SETTINGS = {
    "fixed": {"speculation": "fixed:5"},
    "ahead": {"speculation": "fixed:3,mode=draft_ahead"},
    "ping_pong": {"speculation": "fixed:3,mode=ping_pong"},
    "price": {"speculation": "price"},
    "prune": {"speculation": "price:mode=serial,prune=on"},
    "schedule": {"speculation": "schedule"},
    "cascade": {"speculation": "fixed:4", "drafters": ("suffix", "model")},
    "chunks": {"speculation": "fixed:4", "max_num_tokens": 20},
    "small_cache": {
        "speculation": "fixed:4",
        "kv_cache_config": KvCacheConfig(max_tokens=96),
        "scheduler_config": SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION"),
    },
    "no_reuse": {"speculation": "fixed:4", "kv_cache_config": KvCacheConfig(enable_block_reuse=False)},
}


SOME = ("ping_pong", "price", "small_cache")
"""Settings of drafts whose kind has run in all of them."""


@pytest.mark.parametrize(
    ("built", "name"),
    [
        (draft, name)
        for draft in [*HEADS, *OF_MIXTURES, "model of a mixture"]
        for name in (SETTINGS if EVERYTHING or draft in OF_EACH_KIND else SOME)
    ],
    indirect=["built"],
)
def test_the_text_is_the_targets_own(built, plain, name):
    found, stats = texts(built, **SETTINGS[name])
    assert found.tokens == plain
    if not needs_costs(SETTINGS[name]["speculation"]):  # a random head may not pay
        assert stats["num_tested_drafts_model"] > 0
    if name == "small_cache":
        assert found.num_preemptions > 0
    elif name != "no_reuse":
        assert stats["kv_num_reused_blocks"] > 0, "nothing was reused, so this tests less than it should"


def test_others_do_not_notice_a_cancelled_request(built, plain):
    found, _ = texts(built, speculation="fixed:4", cancel_after=4)
    assert found.reasons["1"] == "cancelled"
    assert found.tokens == plain | {"1": plain["1"][: len(found.tokens["1"])]}


def test_the_profile_measures_what_its_step_costs(built):
    """Also curves that other work disturbed so much that they are left out."""
    measured = {key.partition("@")[0] for key in load_costs(built, 1).errors}
    by_blocks = EngineDir.load(built).draft_head == "block"
    assert {kind for kind in measured if kind.startswith("draft")} == {
        "draft_step",
        "draft_block" if by_blocks else "draft_rows",
    }


def test_it_is_the_default_of_its_engines(built):
    engines = EngineDir.load(built)
    assert [name.value for name in choose_drafters(engines, ExecutorConfig())] == ["model"]


def test_a_block_gives_as_many_drafts_as_it_has(tmp_path):
    """The default length is a block's; a shorter one is kept, a longer one is not."""
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    drafter = make_block_drafter(tmp_path / "drafter", target, "dflash", block_size=12)
    sizes = {name: value for name, value in SIZES.items() if name != "max_draft_len"}
    for asked, found in ((None, 11), (3, 3), (20, 11)):
        options = BuildOptions(target, drafter, tmp_path / f"e{found}{asked}", max_draft_len=asked, **sizes)
        assert build_engines(options).build_config.max_draft_len == found


def test_what_cannot_be_built_is_refused(tmp_path):
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    heads = {
        "an EAGLE-3 head": {"draft_checkpoint_dir": make_head(tmp_path / "head", target)},
        "Medusa heads": {"draft_checkpoint_dir": make_medusa(tmp_path / "medusa", target)},
        "an MTP layer": {"checkpoint_dir": make_mimo(tmp_path / "mimo"), "mtp": True},
    }
    alone = BuildOptions(target, None, tmp_path / "a", **SIZES)
    for kind, options in heads.items():
        with pytest.raises(InvalidArgumentError, match=f"the draft is {kind}, which stays in bf16"):
            build_engines(replace(alone, draft_quantization="int8", **options))
    mtp = replace(alone, **heads["an MTP layer"])
    with pytest.raises(InvalidArgumentError, match=r"mtp is set with draft_checkpoint_dir .*, and one of them drafts"):
        build_engines(replace(mtp, draft_checkpoint_dir=target))
    with pytest.raises(InvalidArgumentError, match="mtp_reads_normed is set without mtp"):
        build_engines(replace(alone, mtp_reads_normed=True))
    with pytest.raises(InvalidArgumentError, match="eagle3_layers is 1,2, but the draft checkpoint is no EAGLE-3 head"):
        build_engines(BuildOptions(target, None, tmp_path / "b", eagle3_layers=(1, 2), **SIZES))
    with pytest.raises(InvalidArgumentError, match="eagle3_norm_output is fed, but the draft checkpoint is no EAGLE"):
        build_engines(BuildOptions(target, None, tmp_path / "b", eagle3_norm_output="fed", **SIZES))
    with pytest.raises(InvalidArgumentError, match="eagle3_norm_output is both; it must be fed or head"):
        build_engines(BuildOptions(target, None, tmp_path / "b", eagle3_norm_output="both", **SIZES))


def test_heads_beside_plans_that_cannot_be(tmp_path):
    load_trt()
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    head = make_head(tmp_path / "head", target)
    sizes = {name: value for name, value in SIZES.items() if name != "tokens_per_block"}
    options = BuildOptions(target, head, tmp_path / "a", backend="tensorrt_rtx", **sizes)
    with pytest.raises(InvalidArgumentError, match="dtype is float32, draft heads run in bfloat16 or float16"):
        build_engines(replace(options, dtype="float32"))
    with pytest.raises(
        InvalidArgumentError, match="max_seq_len is 90, with a draft head tensorrt_rtx needs a multiple"
    ):
        build_engines(replace(options, max_seq_len=90))
    block = make_block_drafter(tmp_path / "block", target)
    with pytest.raises(InvalidArgumentError, match=r"the draft is a block drafter, .* use --backend cpu or cuda"):
        build_engines(replace(options, draft_checkpoint_dir=block))


@pytest.mark.slow
def test_a_target_of_plans_is_interpreted_without_its_head(tmp_path):
    """The plans have outputs for the head, which nobody reads then."""
    load_trt()
    target = make_checkpoint(tmp_path / "target", num_layers=3, head_dim=64)
    head = make_head(tmp_path / "head", target, layers=(0, 2, 3))
    sizes = {name: value for name, value in SIZES.items() if name != "tokens_per_block"}
    engines = build_engines(
        BuildOptions(target, head, tmp_path / "e", backend="tensorrt_rtx", exit_layers=(2,), **sizes)
    )
    assert engines.read_layers == (0, 2, 3)
    interpretation = Interpretation(target, head)
    with open_executor(engines.path, ExecutorConfig(speculation="off"), opener=interpretation) as executor:
        collector = Collector()
        executor.submit("a", PROMPTS[0], SamplingParams(max_tokens=5, end_ids=()), collector.sink("a"))
        while executor.step():
            pass
        assert len(collector.tokens["a"]) == 5
    with pytest.raises(ConfigError, match="has a draft head, which runs on a GPU only; interpret it with"):
        open_executor(engines.path, ExecutorConfig(speculation="fixed:2"), opener=interpretation)


def test_other_layers_are_another_build(tmp_path):
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    head = make_head(tmp_path / "head", target)
    for layers in ((0, 1, 2), (1, 2, 3)):
        built = build_engines(BuildOptions(target, head, tmp_path / "e", eagle3_layers=layers, **SIZES))
        assert built.draft_config["faser"]["eagle3"]["layers"] == list(layers)


def test_what_norm_output_means_is_another_build(tmp_path):
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    head = make_head(tmp_path / "head", target, norm_output=True)
    for says in ("fed", "head"):
        built = build_engines(BuildOptions(target, head, tmp_path / "e", eagle3_norm_output=says, **SIZES))
        assert built.draft_config["faser"]["eagle3"]["feeds_normed"] == (says == "fed")


def test_a_head_s_window_is_refused_where_its_kernels_have_none(tmp_path):
    """A context that the window holds is not cut."""
    target = make_checkpoint(tmp_path / "target", num_layers=3, head_dim=64)
    window = {"layer_types": ["sliding_attention"], "sliding_window": 64}
    options = BuildOptions(target, make_head(tmp_path / "head", target, **window), tmp_path / "e", "cuda", **SIZES)
    with pytest.raises(InvalidArgumentError, match=r"sliding_window of the EAGLE-3 head is 64, .* lower max_seq_len"):
        build_engines(options)
    assert build_engines(replace(options, max_seq_len=64)) is not None


def test_an_expanded_target_is_read_where_it_was(tmp_path):
    """Expanding adds layers that change nothing, so the head has to read the same hidden rows."""
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    head = make_head(tmp_path / "head", target, layers=(0, 1, 3))
    built = build_engines(BuildOptions(target, head, tmp_path / "e", expand=4, **SIZES))
    assert built.draft_config["faser"]["eagle3"]["layers"] == [0, 4, 12]
    mimo = make_mimo(tmp_path / "mimo", num_layers=3)
    built = build_engines(BuildOptions(mimo, None, tmp_path / "m", expand=4, mtp=True, **SIZES))
    assert built.draft_config["faser"]["mtp"]["layers"] == [12]


def test_there_are_no_more_drafts_than_medusa_heads(tmp_path):
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    for num_heads, expected in ((3, 3), (7, SIZES["max_draft_len"])):
        head = make_medusa(tmp_path / str(num_heads), target, num_heads=num_heads)
        built = build_engines(BuildOptions(target, head, tmp_path / f"e{num_heads}", **SIZES))
        assert built.build_config.max_draft_len == expected


def test_medusa_heads_take_a_row_of_each_token_and_no_kv(tmp_path):
    target = make_checkpoint(tmp_path / "target", num_layers=3)
    alone = build_engines(BuildOptions(target, None, tmp_path / "a", **SIZES)).kv_bytes_per_token()
    heads = make_medusa(tmp_path / "heads", target)
    with_heads = build_engines(BuildOptions(target, heads, tmp_path / "b", **SIZES)).kv_bytes_per_token()
    assert with_heads == alone + 4 * 64  # hidden_size values of 4 bytes at most


def test_an_mtp_layer_takes_a_row_of_each_token_and_its_own_kv(tmp_path):
    mimo = make_mimo(tmp_path / "mimo", num_layers=3)
    alone, drafted = (
        build_engines(BuildOptions(mimo, None, tmp_path / f"e{mtp:d}", mtp=mtp, **SIZES)).kv_bytes_per_token()
        for mtp in (False, True)
    )
    assert drafted == alone * 4 // 3 + 4 * 64


def test_the_row_that_an_mtp_layer_reads_is_another_build(tmp_path):
    mimo = make_mimo(tmp_path / "mimo")
    for reads_normed in (False, True):
        options = BuildOptions(mimo, None, tmp_path / "e", mtp=True, mtp_reads_normed=reads_normed, **SIZES)
        assert build_engines(options).draft_config["faser"]["mtp"]["reads_normed"] == reads_normed


@pytest.mark.parametrize("built", [*HEADS, *OF_MIXTURES], indirect=True)
def test_it_drafts_for_no_other_system(built):
    engines = EngineDir.load(built)
    with ExitStack() as stack:
        cores = stack.enter_context(CoreSet(num_threads=1))
        request = OpenRequest(engines, engines.build_config, 8, drafting=True, core_set=cores)
        with pytest.raises(ConfigError, match="reads hidden rows of a target of ours"):
            open_draft(request, stack)
