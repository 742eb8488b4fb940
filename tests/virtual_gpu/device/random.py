"""Torch's random numbers on the virtual GPU: a device in Python cannot have a generator, so the host draws for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.virtual_gpu.device.tensors import NAME

DRAWS = ("randn", "randint")


_REAL = torch.Generator


class _Generator(_REAL):
    def __new__(cls, device: Any = "cpu") -> _REAL:  # type: ignore[misc]
        return _REAL.__new__(_REAL, "cpu" if _is_virtual(device) else device)


def install() -> None:
    """For programs that name a device and its generator, as the sections of `faser bench gpu` do."""
    torch.Generator = _Generator  # type: ignore[misc]
    for name in DRAWS:
        setattr(torch, name, _for_device(getattr(torch, name)))


def _for_device(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(*args: Any, device: Any = "cpu", **kwargs: Any) -> torch.Tensor:
        if not _is_virtual(device):
            return draw(*args, device=device, **kwargs)
        return draw(*args, **kwargs).to(device)

    return drawn


def _is_virtual(device: Any) -> bool:
    return torch.device(device).type == NAME
