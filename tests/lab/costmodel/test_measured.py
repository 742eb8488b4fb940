"""The measured H100 against passes in service of the same day (section timeline, docs/results.md)."""

import pytest

from faser_trtllm.engine.buckets import MAX_GRAPH_ROWS, Buckets
from faser_trtllm.errors import ConfigError
from lab.costmodel.measured import MAX_NUM_TOKENS, MeasuredGpu

CONTEXT = 205.0  # mean of the steps
VERIFY = (
    (4, 4, 6.23),
    (12, 4, 6.41),
    (20, 4, 6.33),
    (16, 16, 6.35),
    (48, 16, 6.64),
    (64, 16, 6.59),
    (80, 16, 7.04),
    (64, 64, 6.96),
    (192, 64, 8.06),
    (238, 64, 8.82),
    (316, 64, 10.08),
    (256, 256, 10.68),
    (765, 256, 20.36),
    (1233, 256, 31.36),
)
DRAFT = ((4, 2.31, 4.07), (16, 2.58, 4.33), (64, 2.67, 4.81), (256, 4.16, 7.54))  # requests, ms of 2 and 4 steps
ROWS_PER_REQUEST = 1.8  # of a draft call's first step: a token of the target's, and often a draft that passed


@pytest.mark.parametrize(("rows", "requests", "ms"), VERIFY)
def test_a_pass_takes_what_it_took_in_service(rows, requests, ms):
    assert MeasuredGpu(is_padded=False).verify_ms(rows, requests, CONTEXT) == pytest.approx(ms, rel=0.05)


@pytest.mark.parametrize(("requests", "two_ms", "four_ms"), DRAFT)
def test_a_draft_call_takes_what_it_took_in_service(requests, two_ms, four_ms):
    gpu = MeasuredGpu(is_padded=False)
    first = gpu.draft_rows_ms(round(ROWS_PER_REQUEST * requests), requests, CONTEXT)
    step = gpu.draft_step_ms(requests, CONTEXT)
    assert first + step == pytest.approx(two_ms, rel=0.06)
    assert first + 3 * step == pytest.approx(four_ms, rel=0.06)


def test_passes_are_padded_to_the_engines_buckets():
    buckets = Buckets(MAX_GRAPH_ROWS, MAX_NUM_TOKENS)
    gpu = MeasuredGpu()
    assert gpu.row_sizes == (*buckets.sizes(), *buckets.large_sizes())
    assert gpu.row_sizes[-1] == MAX_NUM_TOKENS
    for size, following in zip(gpu.row_sizes, gpu.row_sizes[1:], strict=False):
        assert gpu.draft_rows_ms(size + 1, 1, 200.0) == gpu.draft_rows_ms(following, 1, 200.0)


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="'h200-measured'; it must be one of: h100-measured"):
        MeasuredGpu("h200-measured")
