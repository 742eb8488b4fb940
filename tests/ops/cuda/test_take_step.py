"""The take_step kernel, run on the CPU as it is, against its reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.take_step import StepInputs, take_step
from lab.reference.cuda.take_step import take_step_reference
from tests.ops.cuda.emulation import emulated
from tests.support.effort import examples


def inputs(max_requests: int, num_rows: int, width: int) -> StepInputs:
    shapes = ((num_rows,), (num_rows,), (num_rows,), (max_requests,), (max_requests + 1,), (max_requests, width))
    return StepInputs(*(torch.full(shape, 77, dtype=torch.int32) for shape in shapes))


@settings(max_examples=examples(40))
@given(st.integers(0, 6), st.integers(0, 3), st.integers(1, 300), st.integers(0, 2), st.integers(0, 10**6))
def test_the_kernel_is_the_reference(size: int, more: int, columns: int, wider: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 5, shape, generator=generator, dtype=torch.int32)

    requests = random(size), random(size) + 1, random(size), random(size, columns)
    found, wanted = (inputs(max(1, size + more), size + 4, columns + wider) for _ in range(2))
    take_step(emulated("take_step"), *requests, found)
    take_step_reference(*requests, wanted)
    for field in dataclasses.fields(StepInputs):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name


def test_more_requests_or_blocks_than_there_is_room_for_are_refused() -> None:
    three = torch.zeros(3, dtype=torch.int32)
    for made, columns in ((inputs(2, 9, 8), 4), (inputs(4, 2, 8), 4), (inputs(4, 9, 3), 4)):
        with pytest.raises(InvalidArgumentError, match="table is 3 x 4, the inputs have room for"):
            take_step(None, three, three, three, torch.zeros((3, columns), dtype=torch.int32), made)  # type: ignore[arg-type]
