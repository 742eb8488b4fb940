"""Fixtures that the tests of interpreted networks share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of attention, norms and LM head are in float64, so that their order does not change what is rounded."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
