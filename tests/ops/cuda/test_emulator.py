"""The emulator's own rules, shown by kernels that break CUDA's, and that ours keep them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.kernel_cases import CASES, results_of

BYTES = (0x00, 0xFF, 0x7F, 0x55)

# Block 0 leaves a number in shared memory, block 1 reads what it has not written. In templates too, which compilers
# treat differently.
_LEFTOVER = """
#include "common.cuh"
template <typename T>
__device__ T kept_by_template(T value) {
  __shared__ T kept;
  if (blockIdx.x == 0) kept = value;
  return kept;
}
extern "C" __global__ void leftover(float* out) {
  __shared__ float kept;
  if (blockIdx.x == 0) kept = 1.0f;
  out[2 * blockIdx.x] = kept;
  out[2 * blockIdx.x + 1] = kept_by_template(1.0f);
}
"""


@pytest.mark.parametrize("byte", BYTES)
def test_a_block_finds_in_shared_memory_what_the_launch_says(byte: int, tmp_path: Path) -> None:
    (tmp_path / "leftover.cu").write_text(_LEFTOVER)
    out = torch.zeros(4)
    module = emulated("leftover", sources=tmp_path)
    module.shared_byte = byte
    module.launch("leftover", (2, 1, 1), (1, 1, 1), [ctypes.c_void_p(out.data_ptr())])
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2:].view(torch.uint8).tolist() == [byte] * 8


@pytest.mark.parametrize("stem", sorted(CASES))
def test_what_shared_memory_held_before_does_not_matter(stem: str) -> None:
    wanted = results_of(stem)
    for byte in BYTES:
        assert results_of(stem, shared_byte=byte) == wanted, hex(byte)


@pytest.mark.parametrize("stem", sorted(CASES))
def test_the_order_of_threads_does_not_matter(stem: str) -> None:
    wanted = results_of(stem)
    for order in (1, 2, 3):
        assert results_of(stem, order) == wanted
