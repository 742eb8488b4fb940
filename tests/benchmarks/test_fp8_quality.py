"""Tests of what the FP8 quality benchmark prints for a tiny checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.quantization.fp8 import main
from tests.support.checkpoints import make_checkpoint
from tests.support.networks import load_trt


@pytest.mark.slow
def test_fp8_is_near_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_trt()
    main([str(make_checkpoint(tmp_path / "c", num_layers=2)), "1"])
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"perplexity of 512 tokens: bf16 ([\d.]+), FP8 ([\d.]+) \(.*", lines[0])
    assert found is not None
    plain, quantized = map(float, found.groups())
    assert 0.9 < quantized / plain < 1.1
    assert 0.5 < float(lines[2].rsplit(maxsplit=2)[1]) < 25  # percent of the logits' norm
