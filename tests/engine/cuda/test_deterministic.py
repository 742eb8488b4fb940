"""`deterministic`: on emulated kernels speculation changes no text and no bit of a logit; what cannot be so says so."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.engine.opening import OpenRequest, check_request
from faser_trtllm.errors import ConfigError
from tests.engine.cuda.harness import build_pair
from tests.engine.cuda.kernel_rows import RowCountProducts
from tests.engine.cuda.schedules import Schedules, Setting, build, build_mixture, make_requests, opened, run
from tests.support.effort import ONLY_ALL, pick

TOGETHER = Setting(policy_seed=3, max_batch_size=3, max_num_tokens=24, num_blocks=18, drafters=("suffix",))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build(tmp_path_factory.mktemp("pair"))


@pytest.mark.slow
def test_random_schedules_change_no_bit(engines: EngineDir) -> None:
    schedules = Schedules(engines, seed=pick(0, 1))
    schedules.run(*pick((12, 3), (100, 5)))
    for count in (
        "num_accepted_tokens",
        "num_pruned_rows",
        "num_steps_ping_pong",
        *pick((), ("num_prefix_hit_tokens",)),
    ):
        assert schedules.totals[count] > 0, count


@pytest.mark.slow
def test_random_schedules_change_no_bit_in_fp16(tmp_path: Path) -> None:
    Schedules(build(tmp_path, "float16"), seed=2).run(pick(3, 25))


@pytest.mark.slow
@pytest.mark.parametrize("family", pick(["gpt_oss"], ["gpt_oss", "qwen3_moe"]))
def test_random_schedules_change_no_bit_of_a_mixture(tmp_path: Path, family: str) -> None:
    schedules = Schedules(build_mixture(tmp_path, family), seed=5)
    schedules.run(pick(6, 40), 3)
    assert schedules.totals["num_accepted_tokens"] > 0


@ONLY_ALL
@pytest.mark.slow
def test_contexts_that_are_split_change_no_bit(tmp_path: Path) -> None:
    """Contexts of two chunks, in passes with slots for all of them, for a few, or for none that are needed."""
    schedules = Schedules(build(tmp_path, max_seq_len=1024), seed=3, num_texts=12, stem_lens=(780, 900, 780))
    schedules.run(6, 2, prompt_len=780)


@pytest.mark.slow
@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_library_that_counts_rows_changes_texts_unless_it_is_not_called(
    engines: EngineDir, tmp_path: Path, is_mixture: bool
) -> None:
    """Its sums depend on the number of rows. Without the option the same requests have other logits together with
    others, and texts part; with it no product of the target is the library's."""
    if is_mixture:
        engines = build_mixture(tmp_path, "qwen3_moe")
    requests = make_requests(random.Random(0), 7, engines.vocab_size)
    texts = {}
    for deterministic in (False, True):
        with RowCountProducts() as library:
            with opened(engines, Setting(), deterministic) as executor:
                alone = [run(executor, [request], [0])[0] for request in requests]
            with opened(engines, TOGETHER, deterministic) as executor:
                together = run(executor, requests, [0] * len(requests))
        texts[deterministic] = [[tokens for tokens, _ in found] for found in (alone, together)]
        assert (alone == together) is deterministic
        assert (library.count == 0) is deterministic
    assert texts[False][0] != texts[False][1]
    assert texts[True][0] == texts[True][1]


def test_what_cannot_be_deterministic_is_refused(engines: EngineDir, tmp_path: Path) -> None:
    request = OpenRequest(engines, engines.build_config, 16, drafting=True, deterministic=True)
    check_request(request)
    with pytest.raises(ConfigError, match=r"^deterministic is true and quantization is fp8, .*; set deterministic to"):
        check_request(replace(request, quantization=Quantization.FP8))
    split = build_pair(tmp_path / "split", tp_size=2)
    with pytest.raises(
        ConfigError, match=r"^deterministic is true, .* is split over 2 GPUs, .* build with --tp_size 1$"
    ):
        check_request(replace(request, engines=split))
