"""Acceptance of `faser bench serve`: records per request, counters of a server, and both pooled."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serve.acceptance import Acceptance, between, pooled, read_counters, read_record

RECORD = {
    "mean_acceptance_length": 2.25,
    "draft_acceptance_rate": 5 / 12,
    "acceptance_histogram": {"0": 1, "1": 1, "2": 2},
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 12,
    "num_spec_tokens": 3,
}


def test_a_record_of_vllm() -> None:
    found = read_record({"choices": [], "metrics": {"queue_time_ms": 1.0, "speculative_decoding": RECORD}})
    assert found == Acceptance(4, 12, 5, {0: 1, 1: 1, 2: 2})
    assert found.length == RECORD["mean_acceptance_length"]
    assert found.rate == pytest.approx(RECORD["draft_acceptance_rate"])
    assert found.by_position == [0.75, 0.5]


def test_a_record_at_the_only_choice_and_a_histogram_as_a_list() -> None:
    record = RECORD | {"acceptance_histogram": [1, 1, 2]}
    expected = read_record({"metrics": {"speculative_decoding": RECORD}})
    assert read_record({"choices": [{"speculative_decoding_stats": record}]}) == expected
    assert read_record({"choices": 2 * [{"speculative_decoding_stats": record}]}) is None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"metrics": None},
        {"metrics": {"speculative_decoding": None}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": 4}}},
        {"metrics": {"speculative_decoding": RECORD | {"num_draft_tokens": -1}}},
        {"metrics": {"speculative_decoding": RECORD | {"num_spec_steps": 2.0}}},
        {"choices": [None]},
    ],
)
def test_other_answers_have_none(answer: dict[str, Any]) -> None:
    assert read_record(answer) is None


@pytest.mark.parametrize("histogram", [None, 3, {"a": 1}, {"1": -1}, {"1": 1.5}, {"99999": 1}])
def test_a_histogram_of_another_form_is_left_out(histogram: Any) -> None:
    found = read_record({"metrics": {"speculative_decoding": RECORD | {"acceptance_histogram": histogram}}})
    assert found == Acceptance(4, 12, 5)
    assert found.by_position == []


def page(prefix: str, steps: int, drafts: int, accepted: int, positions: tuple[int, ...] = (), engine: int = 0) -> str:
    counters = {"num_drafts_total": steps, "num_draft_tokens_total": drafts, "num_accepted_tokens_total": accepted}
    lines = [f'{prefix}{name}{{engine="{engine}"}} {float(value)}' for name, value in counters.items()]
    per_position = f"{prefix}num_accepted_tokens_per_pos_total"
    lines += [f'{per_position}{{engine="{engine}",position="{j}"}} {value}' for j, value in enumerate(positions)]
    return "# HELP other a gauge\n# TYPE other gauge\nother 3\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize("prefix", ["vllm:spec_decode_", "faser_spec_decode_"])
def test_counters_of_both_names(prefix: str) -> None:
    found = read_counters(page(prefix, 4, 12, 5, (3, 2, 0)))
    assert found == Acceptance(4, 12, 5, {0: 1, 1: 1, 2: 2})
    assert found.by_position == [0.75, 0.5]
    assert read_counters(page(prefix, 4, 12, 5)) == Acceptance(4, 12, 5)


def test_counters_of_several_engines_add_up_and_of_two_names_do_not() -> None:
    two = page("vllm:spec_decode_", 4, 12, 5, (3, 2)) + page("vllm:spec_decode_", 6, 18, 6, (6, 0), engine=1)
    assert read_counters(two) == Acceptance(10, 30, 11, {0: 1, 1: 7, 2: 2})
    both = page("faser_spec_decode_", 4, 12, 5, (3, 2)) + page("vllm:spec_decode_", 4, 12, 5, (3, 2))
    assert read_counters(both) == Acceptance(4, 12, 5, {0: 1, 1: 1, 2: 2})


def test_a_page_without_them() -> None:
    assert read_counters("# TYPE a counter\na_total 3\n") is None


def test_pooled_and_between() -> None:
    one, two = Acceptance(4, 12, 5, {0: 1, 1: 1, 2: 2}), Acceptance(2, 6, 6, {3: 2})
    both = pooled([one, two])
    assert both == Acceptance(6, 18, 11, {0: 1, 1: 1, 2: 2, 3: 2})
    assert between(one, both) == two
    assert pooled([]).length is None
    assert pooled([]).rate is None
