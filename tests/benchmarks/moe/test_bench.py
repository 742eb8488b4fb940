"""The whole bench on a tiny mixture; no time is asserted."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.moe.model import MoeSizes, write_moe_checkpoint
from benchmarks.moe.options import BY_ROWS, OFF, PRICE, MoeBenchOptions
from benchmarks.moe.report import Cell, Count
from benchmarks.moe.runner import run_moe_bench
from benchmarks.moe.systems import PassCounter
from faser_trtllm.errors import InvalidArgumentError

TINY = MoeSizes(num_layers=2, hidden_size=128, num_experts=8, top_k=2, expert_size=64, max_seq_len=256)


@pytest.mark.slow
def test_every_cell_has_every_system(tmp_path: Path) -> None:
    options = MoeBenchOptions(
        tmp_path / "out",
        tmp_path / "models",
        embedding_scales=(0.5,),
        acceptance=(0.7,),
        batch_sizes=(1, 3),
        fixed=(1, 2, 4),
        num_fixed_kept=2,
        seconds=0.2,
        blocks=2,
        slice_ms=1.0,
        profile_s=0.5,
        max_tokens=24,
        sizes=TINY,
        num_threads=1,
    )
    lines: list[str] = []
    report = run_moe_bench(options, lines.append)
    (model,) = report.models
    assert 0.25 <= model.overlap <= 1.0  # 2 of 8 by chance
    assert [(cell.acceptance, cell.batch_size) for cell in report.cells] == [(0.7, 1), (0.7, 3)]
    for cell in report.cells:
        assert set(cell.rates) - {f"fixed:{k}" for k in (1, 2, 4)} == {OFF, PRICE, BY_ROWS}
        assert len(cell.rivals) == 1 + 2, "the slowest fixed length stops after the first block"
        assert all(len(rates) == 2 and min(rates) > 0 for rates in cell.rates.values())
        for count in cell.counts:
            assert 2 <= count.measured <= min(8, 2 * count.num_rows)
        assert {(c.num_requests, c.num_rows) for c in cell.counts} >= {(cell.batch_size, cell.batch_size * 2)}
    data = json.loads((options.output_dir / "moe.json").read_text())
    assert len(data["cells"]) == len(data["ratios"]) == 2
    assert str(tmp_path) not in json.dumps(data)
    assert "price / best" in (options.output_dir / "moe.md").read_text()
    assert write_moe_checkpoint(tmp_path / "models" / model.name, TINY, 0.5), "it is found again"


def test_ratios_and_predictions() -> None:
    rates = {OFF: (10.0, 10.0), "fixed:2": (9.0, 12.0), PRICE: (11.0, 11.0), BY_ROWS: (5.0, 5.0)}
    counts = (Count(1, 1, 30, 4.0, 4.0), Count(1, 2, 10, 8.0, 6.0))
    cell = Cell("m", 0.5, 1, rates, counts)
    assert cell.best == "fixed:2"
    assert cell.ratio(PRICE, OFF).mean == pytest.approx(1.1)
    # In each block against the rival that is best in the other: fixed:2 (9) and off (10).
    assert cell.to_best(PRICE).mean == pytest.approx((11 / 9 * 11 / 10) ** 0.5)
    assert cell.prediction_error() == pytest.approx(0.25 / 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": (1.5,)}, "acceptance has 1.5; it must be between 0 and 1"),
        ({"fixed": (9,)}, "fixed has 9; it must be between 1 and 8"),
        ({"batch_sizes": ()}, "batch_sizes is empty, give at least one"),
        ({"batch_sizes": (0,)}, "batch_sizes has 0; it must be 1 or more"),
        ({"embedding_scales": (0.0,)}, "embedding_scales has 0.0; it must be more than 0"),
        ({"blocks": 1}, "blocks is 1; it must be 2 or more"),
        ({"seconds": 0.0}, "seconds is 0.0; it must be more than 0"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(MoeBenchOptions(tmp_path), **changes).validate()  # type: ignore[arg-type]


def test_the_tokens_of_a_pass_are_those_expected_of_its_drafts() -> None:
    """The pass has a request without drafts, one with two, and the end of a prompt. Each draft passes with
    probability 0.5 if those before it do."""
    counter = PassCounter(0.5)
    result = SimpleNamespace(
        num_verified=np.array([0, 2, 0], np.int32), num_tokens=np.array([1, 3, 1], np.int32), num_experts=5.0
    )
    plan = SimpleNamespace(scheduled=SimpleNamespace(num_decoding=2))
    counter.step(SimpleNamespace(result=result, plan=plan, num_rows=12, num_context_rows=8))  # type: ignore[arg-type]
    assert counter.num_expected == 1 + (1 + 0.5 + 0.25) + 1
    assert not counter.counts, "a prompt is in it"
    plan.scheduled.num_decoding = 3
    counter.step(SimpleNamespace(result=result, plan=plan, num_rows=5, num_context_rows=0))  # type: ignore[arg-type]
    assert counter.counts == {(3, 5): (1, 5.0)}
