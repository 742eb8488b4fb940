"""Tests of the options of `faser plan`, and of its refusals in one sentence."""

import numpy as np
import pytest

from benchmarks.golden import lengths_of
from faser_trtllm.acceptance_curves import published_curves
from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.gpu import GPUS
from lab.costmodel.shape import SHAPES
from lab.planner.load.acceptance import AcceptanceProcess
from lab.planner.memory import plan_memory
from lab.planner.options import (
    find_draft,
    parse_acceptance,
    parse_exit_signal,
    parse_loads,
    parse_requests,
)
from lab.planner.systems import PREFERENCE, SYSTEMS, parse_systems
from tests.lab.planner.questions import B1, B8, H100, make


def test_loads_are_numbers_traces_and_files(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("at_s,prompt_len,output_len\n0,5,7\n1,6,8\n")
    closed, generated, read = parse_loads(f"8,azure:2,{path}", 0)
    assert (closed.name, closed.concurrency) == ("8 in flight", 8)
    assert generated.concurrency is None
    assert [a.at_s for a in generated.arrivals()] == [a.at_s for a in generated.arrivals()]
    assert [(a.prompt_len, a.output_len) for a in read.arrivals()] == [(5, 7), (6, 8)]


def test_requests_have_a_traces_lengths_or_fixed_ones():
    assert parse_requests("1024,512").prompt_mean == 1024
    assert next(parse_requests("1024,512").draw(np.random.default_rng(0), 4096, 4096)) == (1024, 512)
    assert parse_requests("azure").output_mean > 200


def test_off_is_always_there_to_compare_with():
    assert parse_systems("price;fixed:2") == ("off", "price", "fixed:2")
    assert parse_systems(None) == tuple(SYSTEMS)
    assert set(PREFERENCE) == {label for label, system in SYSTEMS.items() if not system.is_head}


def test_a_draft_is_a_model_or_a_head_or_a_block_drafter_of_the_target():
    assert find_draft("llama-3.2-1b", B8) is B1
    head, block = find_draft("eagle3", B8), find_draft("block", B8)
    assert (head.num_layers, head.vocab_size, head.block_size) == (1, 32000, 0)
    assert (block.num_layers, block.vocab_size, block.block_size) == (5, 128256, 16)
    assert block.resident_gb == pytest.approx(5 * 0.436 + 0.168 + 0.084, rel=0.01)  # without an LM head of its own
    assert find_draft("eagle3", SHAPES["qwen3-30b-a3b"]).experts is None


@pytest.mark.parametrize("name", ["eagle3", "dspark", "mtp", "deepseek-v4-pro-mtp/thinking_on"])
def test_a_published_curve_is_met_by_the_requests_that_are_drawn(name):
    """The mean acceptance length at its longest is the curve's, over many requests of the random process."""
    acceptance = parse_acceptance(name)
    num_requests, length = 2000, 40
    process = AcceptanceProcess(acceptance, num_requests, length, 8, 0)
    for number in range(num_requests):
        process.begin(number, number, length)
    slots, places = np.arange(num_requests, dtype=np.int32), np.arange(8)[None].repeat(num_requests, 0)
    passed = np.concatenate([process.draft(slots, places + start, places)[1] for start in range(0, 32, 8)])
    found = 1.0 + np.cumprod(passed, axis=1).sum(axis=1).mean()
    assert acceptance.curve == name
    assert found == pytest.approx(lengths_of(acceptance.by_place)[-1], abs=0.15)
    assert found == pytest.approx(published_curves()[name][-1], abs=0.3)


def test_a_file_cannot_claim_to_be_a_published_curve(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"by_place": [0.5], "curve": "eagle3"}')
    with pytest.raises(InvalidArgumentError, match=r"the acceptance file mine\.json cannot be used"):
        parse_acceptance(str(path))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: parse_loads("", 0), "load is ''"),
        (lambda: parse_loads("0", 0), "load is 0 requests"),
        (lambda: parse_loads("azure:x", 0), "write it like azure:5"),
        (lambda: parse_loads("nothing.csv", 0), "no CSV file"),
        (lambda: parse_requests("1024"), "requests is '1024'"),
        (lambda: parse_requests("99999,1"), "at most 8192,2048"),
        (lambda: parse_exit_signal("0.8"), "exit_signal is '0.8'; it must be two numbers between 0 and 1: "),
        (lambda: parse_exit_signal("0.1,0.2"), "a smaller share of the other drafts"),
        (lambda: parse_systems("prize"), "system is 'prize'; it must be one of: off; "),
        (lambda: parse_acceptance("nothing.json"), "acceptance file nothing.json"),
        (
            lambda: parse_acceptance("eagle2"),
            "'eagle2'; it must be a number, a JSON file, or a published",
        ),
        (lambda: make(tpot_ms=0.0), "tpot_ms is 0.0"),
        (lambda: make(max_requests=0), "max_requests is 0"),
        (lambda: make(max_num_tokens=4), "max_num_tokens is 4"),
        (lambda: make(draft=SHAPES["qwen3-0.6b"]), "151936 tokens, llama-3.1-8b has 128256"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(ask, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_memory_is_weights_caches_and_what_is_left():
    """8.03 billion parameters in bf16 beside a tied 1.24, and 131072 + 32768 bytes per token."""
    plan = plan_memory(H100, B8, B1, 1000)
    assert plan.weights_gb == pytest.approx(16.06 + 2.47, abs=0.02)
    assert plan.kv_gb == pytest.approx(72.0 - 3.0 - plan.weights_gb)
    assert plan.kv_tokens == pytest.approx(plan.kv_gb * 1e9 / 163840, rel=1e-3)
    assert plan.max_batch_size == plan.kv_tokens // 1000
    assert plan_memory(H100, B8, None, 1000).max_batch_size > plan.max_batch_size


@pytest.mark.parametrize(
    ("gpu", "target", "advice", "not_advised"),
    [
        ("h100", "llama-3.3-70b", "--num_gpus 4", "fp8"),
        ("h200", "llama-3.3-70b", "--quantization fp8", "none"),
        ("l40s", "llama-3.3-70b", "a smaller model", "fp8"),
        ("l40s", "qwen3-30b-a3b", "a smaller model", "fp8"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(gpu, target, advice, not_advised):
    with pytest.raises(InvalidArgumentError, match=f"not one request of 1000 tokens fits; take .*{advice}") as caught:
        plan_memory(GPUS[gpu], SHAPES[target], B1, 1000)
    assert not_advised not in str(caught.value).partition(";")[2]
