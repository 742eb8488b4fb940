"""KV caches in fp8: half the memory, e4m3's error, and tokens that no speculation changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.config import ExecutorConfig, KvCacheDtype, parse
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from tests.engine.cuda.harness import HEADS, build_with_head, open_engine, random_tokens
from tests.engine.cuda.host_executor import generate, mixed_requests
from tests.ops.cuda.emulation import emulated
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL, pick
from tests.support.engine_harness import Harness

FP8 = KvCacheDtype.FP8
REQUESTS = mixed_requests(True)
POLICIES = ["erratic", *pick([], ["fixed:3:draft_ahead", "fixed:4", "price:mode=ping_pong,prune=on"])]
HALF_STEP = 2.0**-4  # of e4m3, relative: three bits behind the first


@pytest.fixture(scope="module")
def alone(engines) -> list[list[int]]:
    return generate(engines, "off", REQUESTS, max_batch_size=1, max_num_tokens=128, kv_dtype=FP8)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_changes_no_token(engines, alone, policy: str) -> None:
    tokens, found = generate(engines, policy, REQUESTS, kv_dtype=FP8)
    assert tokens == alone
    assert found["num_accepted_tokens"] > 0


def test_a_reused_prefix_changes_no_token(engines) -> None:
    prompt = list(range(3, 100))
    asked = [([*prompt, 7], REQUESTS[0][1]), ([*prompt, 9], REQUESTS[1][1])]
    apart = [generate(engines, "fixed:3", [request], max_num_tokens=64, kv_dtype=FP8)[0][0] for request in asked]
    tokens, found = generate(engines, "fixed:3", asked, max_batch_size=1, max_num_tokens=64, kv_dtype=FP8)
    assert tokens == apart
    assert found["num_prefix_hit_tokens"] >= 96


def test_keys_and_values_are_e4m3s(engines) -> None:
    """Logits are near those over a whole cache, and are not the same."""
    tokens, logits = random_tokens(60) % 300, []
    for kv_dtype in KvCacheDtype:
        with open_engine(engines.target_path, kv_dtype=kv_dtype) as engine:
            logits.append(Harness(engine).run([(0, tokens, 0, 60)])[0])
    whole, rounded = logits
    error = (rounded - whole).std() / whole.std()
    assert HALF_STEP / 16 < error < HALF_STEP


def test_the_kernels_store_and_read_what_their_references_do(engines) -> None:
    """append_kv and verify_attention themselves, emulated, in a bf16 engine."""
    tokens, found = random_tokens(40) % 300, []
    kernels = Ops(
        {"append_kv": emulated("append_kv"), "verify_attention": emulated("verify_attention", {"FASER_HEAD_DIM": 64})},
        lambda: 0,
        num_sms=4,
    )
    ops = ReferenceOps()
    ops.append_kv, ops.verify_attention = kernels.append_kv, kernels.verify_attention
    for each in (ReferenceOps(), ops):
        with open_engine(engines.target_path, each, torch.bfloat16, kv_dtype=FP8) as engine:
            harness = Harness(engine)
            found.append(np.concatenate(harness.run([(1, tokens, 0, 33)]) + harness.run([(1, tokens, 33, 40)])))
    assert (found[0] - found[1]).std() < 0.02 * found[0].std()


@ONLY_ALL
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_and_ranks_have_such_caches_too(tmp_path: Path, kind: str) -> None:
    engines = [build_with_head(tmp_path / str(size), exit_layers=(2,), tp_size=size, **HEADS[kind]) for size in (1, 2)]
    expected = generate(engines[0], "off", REQUESTS, kv_dtype=FP8)[0]
    for each in engines:
        tokens, found = generate(each, "fixed:4", REQUESTS, kv_dtype=FP8)
        assert tokens == expected
        assert found["num_accepted_tokens"] > 0


def test_bytes_are_counted_by_their_type(engines) -> None:
    pretrained = engines.target_config["pretrained_config"]
    assert engines.kv_bytes_per_token() == 2 * engines.kv_bytes_per_token(1)
    heads = pretrained["num_key_value_heads"] * pretrained["head_size"]
    assert engines.kv_bytes_per_token(1) == 2 * heads * (pretrained["num_hidden_layers"] + 1)


def test_other_backends_say_that_they_have_none(tmp_path: Path) -> None:
    from faser_trtllm.builder.build import BuildOptions, build_engines

    target, draft = make_pair(tmp_path / "checkpoints")
    build_engines(BuildOptions(target, draft, tmp_path / "engines"))
    config = parse(ExecutorConfig, {"kv_cache_config": {"dtype": "fp8"}})
    with pytest.raises(
        ConfigError, match=r"^kv_cache_config\.dtype is fp8, .* holds cpu engines, whose KV cache has"
    ) as e:
        open_executor(tmp_path / "engines", config)
    assert str(e.value).endswith("set it to auto or build with --backend cuda")
    with pytest.raises(ConfigError, match=r"kv_cache_config\.dtype is 'int8': input should be 'auto' or 'fp8'"):
        parse(ExecutorConfig, {"kv_cache_config": {"dtype": "int8"}})
