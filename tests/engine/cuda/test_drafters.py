"""Drafts of the requests' own text under the whole executor on cuda engines: alone, and before the draft model's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.sampling_params import SamplingParams
from tests.engine.cuda.host_executor import KernelAcceptGpu, generate, repeating_requests
from tests.support.effort import pick
from tests.support.toy_guide import ToyGuide

pytestmark = pytest.mark.slow

DRAFTERS = [*pick([], ["suffix"]), "suffix,model"]
POLICIES = [
    *pick([], ["fixed:1", "fixed:4", "fixed:3:ping_pong", "price:prune=on", "price:mode=draft_ahead"]),
    "fixed:3:draft_ahead",
    "erratic",
    "price:mode=ping_pong,prune=on",
]


@pytest.fixture(scope="module")
def alone(engines: EngineDir):
    """Requests, and their tokens without speculation, one request at a time."""
    requests = repeating_requests()
    return requests, generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)[0]


@pytest.fixture(scope="module")
def guided(engines: EngineDir):
    """Requests, most of which have a guide, and their tokens without speculation, one request at a time."""
    plain = repeating_requests()
    guides = [ToyGuide.random(320, seed, 2) if seed % 3 else None for seed in range(len(plain))]
    requests = [(prompt, replace(params, guide=g)) for (prompt, params), g in zip(plain, guides, strict=True)]
    return requests, generate(engines, "off", requests, max_batch_size=1, max_num_tokens=128)[0]


def check_counts(found, drafters: str) -> None:
    """Each source's drafts are tested, and those that passed are what was accepted."""
    names = drafters.split(",")
    passed = {name: found[f"num_passed_drafts_{name}"] for name in names}
    assert all(0 < passed[name] < found[f"num_tested_drafts_{name}"] for name in names)
    assert sum(passed.values()) == found["num_accepted_tokens"]


@pytest.mark.parametrize("drafters", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_does_not_depend_on_who_drafts(engines: EngineDir, alone, policy: str, drafters: str) -> None:
    requests, expected = alone
    tokens, found = generate(engines, policy, requests, drafters=drafters)
    assert tokens == expected
    check_counts(found, drafters)
    if policy == "erratic":
        assert found["num_pruned_rows"] > 0


@pytest.mark.parametrize("drafters", DRAFTERS)
def test_the_kernels_themselves_give_the_same_tokens(engines: EngineDir, alone, drafters: str) -> None:
    """Emulated: who proposed a draft is packed for the kernels' own pointers. And the counts are the references'."""
    requests, expected = alone
    tokens, found = generate(engines, "fixed:3", requests, KernelAcceptGpu(), drafters=drafters)
    assert tokens == expected
    check_counts(found, drafters)
    _, by_reference = generate(engines, "fixed:3", requests, drafters=drafters)
    names = [name for name in found if name.startswith(("num_tested_drafts", "num_passed_drafts"))]
    assert [found[name] for name in names] == [by_reference[name] for name in names]


@pytest.mark.parametrize("drafters", DRAFTERS)
def test_guided_requests_get_allowed_tokens(engines: EngineDir, guided, drafters: str) -> None:
    """The draft model's drafts are drawn without masks, and the text's may come behind ones that a guide forbids."""
    requests, expected = guided
    for policy in ("fixed:4", "erratic"):
        tokens, found = generate(engines, policy, requests, drafters=drafters)
        assert tokens == expected
        check_counts(found, drafters)


@pytest.mark.parametrize("drafters", DRAFTERS)
def test_unseeded_requests_are_preempted_with_their_drafts(engines: EngineDir, drafters: str) -> None:
    """In blocks for two at a time; where a model draws, its distributions wait with them."""
    params = SamplingParams(max_tokens=60, temperature=0.3, end_ids=())
    requests = [((prompt * 2)[:50], params) for prompt, _ in repeating_requests()]
    options = {"num_blocks": 8, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}
    tokens, found = generate(engines, "erratic", requests, drafters=drafters, **options)
    assert [len(text) for text in tokens] == [60] * len(requests)
    assert found["num_preemptions"] > 0
    check_counts(found, drafters)
