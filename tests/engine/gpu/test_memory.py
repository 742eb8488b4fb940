"""How many KV blocks a GPU's free memory holds beside weights and buffers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.config import KvCacheDtype, Quantization
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.gpu.memory import fit_blocks
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.errors import ConfigError
from tests.engine.cuda.harness import build_pair
from tests.engine.cuda.host_executor import HostGpu

VOCAB_SIZE, BLOCK = 300, 32
WEIGHTS = {"target": 700_000, "draft": 50_000}
# Logits of 4 x 5 rows on both engines, probs of 4 drafts for 4 slots, edited logits of 4 x 5 rows and of 4 drafts.
BUFFERS = 4 * VOCAB_SIZE * (2 * 20 + 4 * 4 + 20 + 4)


@dataclass(frozen=True)
class Directory:
    vocab_size: int = VOCAB_SIZE
    target_path: Path = Path("target")
    draft_path: Path = Path("draft")

    def kv_bytes_per_token(self, itemsize: int | None = None) -> int:
        return 50 * (itemsize or 2)


REQUEST = OpenRequest(Directory(), BuildConfig(4, 32, 128, 4, BLOCK), 16, drafting=True)


def test_all_blocks_fit_to_the_byte_or_are_refused() -> None:
    exact = sum(WEIGHTS.values()) + BUFFERS + 16 * BLOCK * 100
    assert fit_blocks(REQUEST, WEIGHTS, exact) == 16
    with pytest.raises(ConfigError) as error:
        fit_blocks(REQUEST, WEIGHTS, exact - 1)
    message = str(error.value)
    assert message.startswith(
        "the engines need 0.00 GiB of GPU memory (weights of the target 0.00, weights of the draft"
    )
    assert "max_seq_len or max_batch_size, set quantization to fp8, build with a larger --tp_size (cuda)" in message
    with pytest.raises(ConfigError, match="max_batch_size, build with a larger --tp_size"):
        fit_blocks(replace(REQUEST, quantization=Quantization.FP8), WEIGHTS, exact - 1)


def test_an_fp8_cache_holds_twice_the_blocks() -> None:
    beside = sum(WEIGHTS.values()) + BUFFERS
    half = replace(REQUEST, kv_memory_fraction=0.5)
    assert fit_blocks(replace(half, kv_dtype=KvCacheDtype.FP8), WEIGHTS, beside + 2 * 6 * BLOCK * 100) == 12


def test_a_fraction_of_what_is_left_holds_as_many_blocks_as_it_can() -> None:
    beside = sum(WEIGHTS.values()) + BUFFERS
    half = replace(REQUEST, kv_memory_fraction=0.5)
    assert fit_blocks(half, WEIGHTS, beside + 2 * 9 * BLOCK * 100) == 9
    assert fit_blocks(half, WEIGHTS, beside + 2 * 9 * BLOCK * 100 - 2) == 8
    assert fit_blocks(half, WEIGHTS, beside + 10**9) == 16, "no more than wanted"
    assert fit_blocks(half, WEIGHTS, beside + 2 * 4 * BLOCK * 100) == 4, "one request of max_seq_len"
    with pytest.raises(ConfigError, match="free and 50% of what is left may hold KV; lower"):
        fit_blocks(half, WEIGHTS, beside + 2 * 4 * BLOCK * 100 - 2)
    with pytest.raises(ConfigError, match=r"of GPU memory \(weights of the target"):
        fit_blocks(half, WEIGHTS, beside - 1)


def test_branches_take_a_block_and_two_rows_of_logits_each() -> None:
    """One of them for edits."""
    exact = sum(WEIGHTS.values()) + BUFFERS + 16 * BLOCK * 100 + 4 * 3 * (2 * 4 * VOCAB_SIZE + BLOCK * 100)
    tree = replace(REQUEST, num_branches=3)
    assert fit_blocks(tree, WEIGHTS, exact) == 16
    with pytest.raises(ConfigError, match=r"branches 0\.00.*; lower num_branches, kv_cache_config"):
        fit_blocks(tree, WEIGHTS, exact - 1)


def test_without_a_draft_only_the_target_counts() -> None:
    alone = replace(REQUEST, limits=BuildConfig(4, 32, 128, 0, BLOCK), drafting=False)
    exact = 700_000 + 4 * VOCAB_SIZE * (4 + 4) + 16 * BLOCK * 100
    assert fit_blocks(alone, {"target": 700_000}, exact) == 16
    with pytest.raises(ConfigError):
        fit_blocks(alone, {"target": 700_000}, exact - 1)


def test_at_most_256_rows_of_a_large_batch_are_edited_at_once() -> None:
    large = replace(REQUEST, limits=BuildConfig(256, 8192, 128, 8, BLOCK))
    rows = 2 * 2304 + 256 * 8 + 256 + 256  # logits, probs, edited logits of the target and of the draft
    exact = sum(WEIGHTS.values()) + 4 * VOCAB_SIZE * rows + 16 * BLOCK * 100
    assert fit_blocks(large, WEIGHTS, exact) == 16
    with pytest.raises(ConfigError, match=r"logits with penalties 0\.00"):
        fit_blocks(large, WEIGHTS, exact - 1)


@pytest.mark.parametrize(("max_batch_size", "max_num_tokens", "num_branches"), [(4, 128, 0), (4, 14, 2), (64, 512, 0)])
def test_memory_for_edits_is_what_was_planned(
    tmp_path: Path, max_batch_size: int, max_num_tokens: int, num_branches: int
) -> None:
    """And is there before a request needs it."""
    limits = BuildConfig(max_batch_size, max_num_tokens, 128, 4, 32)
    request = OpenRequest(build_pair(tmp_path), limits, 24, drafting=True, num_branches=num_branches)
    with ExitStack() as stack:
        opened = open_cuda_engines(request, HostGpu(), stack)
        target_rows, draft_rows = opened.sampler._edited.shape[0], opened.draft._draft_loop._edited.shape[0]
    most = min(5 * max_batch_size, max_num_tokens) + num_branches * max_batch_size
    assert (target_rows, draft_rows) == (min(most, max_num_tokens, 256), max_batch_size)
