"""The datasets of `faser bench serve`, in files written here in the formats that are published."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve.dataset import MAX_TURNS, PLACEHOLDER, Conversation, read_dataset
from faser_trtllm.errors import InvalidArgumentError


def write_lines(directory: Path, rows: list[Any], name: str = "question.jsonl") -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = directory / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a note.", "Shorten it."], "reference": ["a"]}
SPEED_BENCH = {
    "question_id": "ab" * 16,
    "category": "coding",
    "sub_category": "python",
    "turns": ["Write a loop."],
    "source": "own",
    "multiturn": False,
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n",
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}


@pytest.mark.parametrize("name", ["mt_bench", "spec_bench", "speed_bench"])
def test_questions_have_turns_and_categories(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path, [MT_BENCH, SPEED_BENCH])
    assert read_dataset(name, path) == [
        Conversation(("Compose a note.", "Shorten it."), "writing"),
        Conversation(("Write a loop.",), "coding"),
    ]


def test_prepared_speed_bench_has_messages(tmp_path: Path) -> None:
    def row(*messages: tuple[str, str]) -> dict[str, Any]:
        return {"category": "math", "messages": [{"role": role, "content": text} for role, text in messages]}

    several = row(("user", "one"), ("user", "two"))
    system = row(("system", "be brief"), ("user", "one"), ("user", "two"))
    answered = row(("user", "one"), ("assistant", "1"), ("user", "two"))
    found = read_dataset("speed_bench", write_lines(tmp_path, [several, system, answered]))
    assert [c.turns for c in found] == [("one", "two"), ("one", "two"), ("two",)]
    assert [[m["role"] for m in c.history] for c in found] == [[], ["system"], ["user", "assistant"]]
    assert {c.category for c in found} == {"math"}


@pytest.mark.parametrize("name", ["HumanEval.jsonl", "HumanEval.jsonl.gz"])
def test_human_eval_packed_or_not(tmp_path: Path, name: str) -> None:
    assert read_dataset("humaneval", write_lines(tmp_path, [HUMAN_EVAL], name)) == [
        Conversation(("def one():\n",), "humaneval")
    ]


def test_share_gpt_takes_the_first_exchange_and_leaves_out_the_rest(tmp_path: Path) -> None:
    def entry(*values: str) -> dict[str, Any]:
        said = [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]
        return {"id": "x_0", "conversations": said}

    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([entry("hello", "hi there", "more"), entry("alone"), entry(), {"id": "y"}]))
    (found,) = read_dataset("sharegpt", path)
    assert (found.turns, found.reference, found.category) == (("hello",), "hi there", "sharegpt")


def test_custom_is_that_of_vllm_with_a_category(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "output_tokens": 7, "category": "short", "more": 1}]
    assert read_dataset("custom", write_lines(tmp_path, rows)) == [
        Conversation(("a",), "all"),
        Conversation(("b",), "short", output_len=7),
    ]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mt_bench", {"category": "x"}, "line 1: turns is None; it must be a list of 1 to 128"),
        ("mt_bench", {"category": "x", "turns": []}, "line 1: turns is a list of 0"),
        ("mt_bench", {"turns": ["a"] * (MAX_TURNS + 1)}, "line 1: turns is a list of 129"),
        ("mt_bench", {"turns": ["a", 3]}, r"line 1: turns\[1\] is 3; it must be a text"),
        ("mt_bench", {"turns": ["a", ""]}, r"line 1: turns\[1\] is empty"),
        ("mt_bench", {"turns": ["a"], "category": 4}, "line 1: category is 4; it must be a text"),
        ("mt_bench", {"turns": ["\ud800"]}, r"line 1: turns\[0\] has half of a surrogate pair"),
        ("mt_bench", ["a"], "line 1 is a list of 1; it must be an object"),
        ("speed_bench", {"turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH"]}, "placeholder for a text"),
        ("speed_bench", {"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\] must have a role"),
        (
            "speed_bench",
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages must end with one of the user",
        ),
        ("humaneval", {"task_id": "HumanEval/0"}, "line 1: prompt is None; it must be a text"),
        ("custom", {"prompt": "a", "output_tokens": 0}, "line 1: output_tokens is 0; it must be 1 to"),
        ("custom", {"prompt": "a", "output_tokens": True}, "line 1: output_tokens is True"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, row: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_dataset(name, write_lines(tmp_path, [row]))


@pytest.mark.parametrize(
    ("name", "file", "data", "message"),
    [
        ("custom", "a.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "line 2 is no JSON"),
        ("custom", "a.jsonl", b"\n \n", "has no prompts"),
        ("custom", "a.jsonl", b"\xff\xfe\n", "line 1 is no JSON"),
        ("custom", "a.jsonl.gz", b"not packed", "cannot be read"),
        ("custom", "a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9], "cannot be read"),
        ("speed_bench", "test.parquet", b"PAR1\x15\x04", "is a Parquet file; convert it to JSONL"),
        ("sharegpt", "a.json", b'{"id": 1}', "must be a JSON array"),
        ("sharegpt", "a.json", b"[" * 200_000, "is no JSON"),
        ("sharegpt", "a.json", b'[{"conversations": [3, 4]}]', r"conversations\[0\] is 3; it must be an object"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, file: str, data: bytes, message: str) -> None:
    (tmp_path / file).write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=message):
        read_dataset(name, tmp_path / file)


def test_no_file_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read: No such file or directory"):
        read_dataset("mt_bench", tmp_path / "question.jsonl")
