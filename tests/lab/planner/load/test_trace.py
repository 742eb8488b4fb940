"""Traces are read as their columns are named, and what is wrong in them is told by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser_trtllm.errors import InvalidArgumentError
from lab.planner.load.trace import read_trace


def read(folder: Path, text: str) -> list[tuple[float, int | None, int | None]]:
    (folder / "trace.csv").write_text(text)
    return [(row.at_s, row.num_input_tokens, row.num_output_tokens) for row in read_trace(folder / "trace.csv")]


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,num_input_tokens,num_output_tokens\n10,5,7\n12.5,20,0\n",
        "output_len,at_s,prompt_len\n7,10,5\n0,12.5,20\n",
        "Timestamp,Model,Request tokens,Response tokens\n10,GPT-4,5,7\n12.5,GPT-4,20,0\n",
    ],
)
def test_the_columns_of_ours_and_of_public_traces_are_known(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == [(10.0, 5, 7), (12.5, 20, 0)]


def test_an_azure_trace_over_midnight(tmp_path: Path) -> None:
    first, second, _ = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9000000,4808,10\n2023-11-17 00:00:00.4000000,3180,8\n2024-05-10 00:00:01,110,27\n",
    )
    assert second[0] - first[0] == pytest.approx(0.5, abs=1e-6)
    assert (first[1:], second[1:]) == ((4808, 10), (3180, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace trace.csv has no column arrival_s or at_s or timestamp"),
        ("when\n1\n", "add one to its header"),
        ("arrival_s\n1\nsoon\n", "trace trace.csv line 3: arrival_s is 'soon'; it must be seconds or a date and time"),
        ("arrival_s\nnan\n", "line 2: arrival_s is 'nan'"),
        ("TIMESTAMP\n2023-11-16 25:00:00\n", "TIMESTAMP is '2023-11-16 25:00:00'"),
        ("arrival_s,num_output_tokens\n1,2.5\n", "num_output_tokens is '2.5'; it must be a whole number"),
        ("arrival_s,num_output_tokens\n1\n", "num_output_tokens is None"),
    ],
)
def test_a_bad_trace_is_told_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"trace gone\.csv cannot be read: No such file"):
        list(read_trace(tmp_path / "gone.csv"))
    (tmp_path / "trace.csv").write_bytes(b"arrival_s\n\xff\n")
    with pytest.raises(InvalidArgumentError, match="it is not a CSV file in UTF-8"):
        list(read_trace(tmp_path / "trace.csv"))
