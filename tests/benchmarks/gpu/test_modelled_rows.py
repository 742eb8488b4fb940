"""The arithmetic of the kernels' modelled times: bounds that no kernel can beat, and blocks as the ops launch them."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.gpu import modelled_rows as modelled
from lab.costmodel.gpu import find_gpu


@pytest.mark.parametrize("name", modelled.KERNELS)
def test_no_kernel_is_faster_than_its_bytes(name: str) -> None:
    gpu, kernel = find_gpu("h100"), modelled.KERNELS[name]()
    assert kernel.blocks_per_row * (kernel.block.first + kernel.block.written) == pytest.approx(kernel.once_bytes)
    times = [modelled.modelled_us(kernel, num_rows, gpu) for num_rows in (1, 131, 132, 133, 1280)]
    assert times == sorted(times)
    for num_rows, found in zip((1, 131, 132, 133, 1280), times, strict=True):
        assert found > modelled.once_us(kernel, num_rows, gpu)


def test_a_row_of_one_block_is_bounded_by_its_sm() -> None:
    gpu, kernel = find_gpu("h100"), modelled.silu_e4m3()
    alone, full = (modelled.modelled_us(kernel, num_rows, gpu) for num_rows in (1, 64))
    assert alone == full == pytest.approx(modelled.FIXED_US + modelled.LAUNCH_US + kernel.once_bytes / 45e3)
    again = dataclasses.replace(kernel, block=dataclasses.replace(kernel.block, again=1e5))
    assert modelled.modelled_us(again, 1, gpu) > alone


def test_more_rows_than_the_memory_gives_at_once_take_what_their_bytes_take() -> None:
    gpu, kernel = find_gpu("h100"), modelled.silu_e4m3()
    found, once = modelled.modelled_us(kernel, 13_200, gpu), modelled.once_us(kernel, 13_200, gpu)
    assert found == pytest.approx(once + modelled.FIXED_US + modelled.LAUNCH_US, rel=1e-3)
