"""Test that early exits pay on a mixture of experts: dropped rows read fewer experts in the layers left."""

import pytest

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_curve import CostCurve
from faser_trtllm.core.cost_table import CostTable, ExitModel, Fingerprint
from faser_trtllm.profiling.exit_models import ExitQuality, judge

EXPERT_MS, FIXED_MS = 0.15, 2.5  # as of Qwen3-30B-A3B on an H100
MODEL = ExitModel(1, rank=-1.0, gap=0.0, survival=1.0, intercept=0.0)
SEES_80 = ExitQuality(1, 12, 0.2, 0.99, 0.8, 0.3, 300, baseline_precision=0.6, baseline_recall=0.5)
SEES_10 = ExitQuality(1, 12, 0.2, 0.99, 0.1, 0.04, 40, baseline_precision=0.9, baseline_recall=0.1)


def table(per_expert_ms, boundary_ms):
    """A pass whose rows cost next to nothing but for the experts that they read, in segments of 1/4 and 3/4."""

    def curve(share):
        rows, ms = (1, 512), (share * FIXED_MS, share * (FIXED_MS + 0.5))
        return CostCurve(rows, ms, per_expert_ms=share * per_expert_ms)

    shares = {"verify": 1.0, "segment:0": 0.25, "segment:1": 0.75}
    curves = {f"{kind}@all": curve(share) for kind, share in shares.items()}
    curves["exit:1@all"] = CostCurve((1, 512), (boundary_ms, boundary_ms))
    return CostTable(Fingerprint("toy", "toy", 1, "toy"), curves, routing=Routing(128, 8))


@pytest.mark.parametrize(
    ("per_expert_ms", "boundary_ms", "quality", "pays"),
    [
        (EXPERT_MS, 0.06, SEES_80, True),
        (EXPERT_MS, 0.06, SEES_10, False),
        (EXPERT_MS, 2.0, SEES_80, False),
        (0.0, 0.06, SEES_80, False),
    ],
    ids=["experts are dropped", "too little is seen", "the boundary costs more", "a dense twin"],
)
def test_exits_pay_where_the_experts_of_dropped_rows_cost_more_than_the_boundary(
    per_expert_ms, boundary_ms, quality, pays
):
    (model,) = judge([MODEL], [quality], table(per_expert_ms, boundary_ms), num_drafts=5, acceptance=0.7)
    assert model.pays is pays
