"""The emulator's own rules, shown by kernels that break CUDA's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from tests.ops.cuda.emulation import emulated

# Block 0 leaves a number in shared memory, block 1 reads what it has not written.
_LEFTOVER = """
#include "common.cuh"
extern "C" __global__ void leftover(float* out) {
  __shared__ float kept;
  if (blockIdx.x == 0) kept = 1.0f;
  out[blockIdx.x] = kept;
}
"""


def test_a_block_finds_nothing_in_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "leftover.cu").write_text(_LEFTOVER)
    out = torch.zeros(2)
    module = emulated("leftover", sources=tmp_path)
    module.launch("leftover", (2, 1, 1), (1, 1, 1), [ctypes.c_void_p(out.data_ptr())])
    assert out[0] == 1.0
    assert out[1].isnan()
