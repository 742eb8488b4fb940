"""Steps of a pair by the cost model's arithmetic."""

from __future__ import annotations

from benchmarks.model.steps import ping_pong_ms, step_ms
from lab.costmodel.gpu import GPUS
from lab.costmodel.pair import Pair
from lab.costmodel.shape import SHAPES


def test_two_half_batches_lose_and_least_with_many_requests() -> None:
    """On the H100, the demo pair reached 0.55, 0.88 and 0.88 of serial steps with 16, 64 and 256 requests."""
    models = SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"]
    serial = Pair(GPUS["h100"], *models)
    splits = [Pair(GPUS["h100"], *models, draft_sms=sms) for sms in (16, 32, 48)]

    def tokens(length: int) -> float:
        return sum(0.85**place for place in range(length + 1))

    def gain(batch: int) -> float:
        best = max(tokens(k) / step_ms(serial, k, batch, 1024) for k in range(9))
        return max(tokens(k) / ping_pong_ms(pair, k, batch, 1024) for pair in splits for k in range(1, 7)) / best

    assert gain(4) < gain(256) < 1.0
