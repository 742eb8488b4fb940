"""The copy_kv kernel, run on the CPU as it is, against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.copy_kv import copy_kv
from lab.reference.cuda.copy_kv import copy_kv_reference
from tests.ops.cuda.copied_tokens import DTYPES, compare, random_cache
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.paged_cases import garbage
from tests.support.effort import examples


@settings(max_examples=examples(40))
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (6, 5, 3)), st.sampled_from([1, 7, 16, 32])),
    head_dim=st.sampled_from([16, 64, 80, 256]),
    dtype=st.sampled_from(DTYPES),
    num_copies=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_is_the_reference(shape, head_dim: int, dtype: torch.dtype, num_copies: int, seed: int) -> None:
    compare(emulated("copy_kv"), (*shape, head_dim), dtype, num_copies, seed)


def test_what_does_not_exist_is_not_copied() -> None:
    """Blocks and offsets out of range, and any garbage."""
    cache = random_cache((2, 3, 2, 16, 16), torch.bfloat16, 1)
    wrong = [(3, 0, 0, 1), (0, 3, 0, 1), (-1, 0, 0, 1), (0, -1, 0, 1), (0, 1, -1, 1), (0, 1, 0, 17), (0, 1, 5, 5)]
    wrong += [(0, 1, 9, 3), (0, 1, 2**31 - 1, -(2**31))]
    copies = torch.tensor(wrong, dtype=torch.int32).t().contiguous()
    found = cache.clone()
    copy_kv(emulated("copy_kv"), copies, found)
    copy_kv_reference(copies, found)
    assert torch.equal(found, cache)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        copy_kv(emulated("copy_kv"), garbage(generator, copies), cache)


def test_wrong_tensors_are_refused() -> None:
    copies, cache = torch.zeros((4, 1), dtype=torch.int32), torch.zeros((1, 2, 3, 16, 16)).bfloat16()
    for wrong, of, message in (
        (copies[:3], cache, r"copies has shape \[3, 1\]"),
        (copies, cache[0], r"the cache has shape \[2, 3, 16, 16\]"),
        (copies, cache.transpose(1, 2), "it must be contiguous"),
        (copies, cache[..., :4].contiguous(), "rows of 8 bytes; it must be a multiple of 16"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            copy_kv(None, wrong, of)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(on_gpu, dtype: torch.dtype) -> None:
    module = on_gpu("copy_kv")
    for seed in range(5):
        compare(module, (64, 40, 8, 32, 128), dtype, 16, seed, "cuda")
