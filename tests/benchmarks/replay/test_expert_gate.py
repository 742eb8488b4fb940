"""Bounds on `price` with mixtures of experts, simulated on constants of an H100."""

import pytest

from benchmarks.replay.experts import BY_ROWS, MIXTURES, OFF, PRICE, best_rival, rates
from tests.support.effort import pick

QWEN, GPT_OSS = "Qwen3-30B-A3B", "gpt-oss-20b"
CELLS = pick(
    [(GPT_OSS, 0.5, 1), (GPT_OSS, 0.5, 4)],
    [(name, a, load) for name in (QWEN, GPT_OSS) for a in (0.5, 0.7, 0.9) for load in (1, 4, 16, 64)],
)

pytestmark = pytest.mark.slow


def tokens_per_s(name, acceptance, load, *policies):
    return rates(MIXTURES[name], 0.2, acceptance, load, policies, num_jobs=min(25 * load, 400))


@pytest.mark.parametrize(("name", "acceptance", "load"), CELLS)
def test_the_price_is_near_the_best_and_never_below_off(name, acceptance, load):
    """Batches of 4 to 16 are a valley, where each row reads experts of its own."""
    found = tokens_per_s(name, acceptance, load, PRICE)
    assert found[PRICE] > 0.99 * found[OFF]
    assert found[PRICE] > 0.99 * found[best_rival(found)]


def test_costs_by_rows_alone_are_worse():
    """The profile of BY_ROWS runs passes of any batch size with the experts of one request."""
    found = tokens_per_s(QWEN, 0.7, 4, PRICE, BY_ROWS)
    assert found[PRICE] > 1.01 * found[BY_ROWS]
    assert found[PRICE] > 0.99 * found[best_rival(found)]
