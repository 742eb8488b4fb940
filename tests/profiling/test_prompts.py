"""Prompts come from held-out files, are equally long and repeatable."""

import random
from pathlib import Path

import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.profiling.prompts import HELD_OUT_STRIDE, draw_prompts, library_files


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def write_library(root: Path, num_files: int) -> None:
    """File i holds 100 tokens i * 1000, i * 1000 + 1, ..., so that a token tells its file."""
    for i in range(num_files):
        text = " ".join(str(1000 * i + j) for j in range(100))
        (root / f"m{i:03d}.py").write_text(text)


def test_prompts_are_windows_of_held_out_files(tmp_path: Path) -> None:
    write_library(tmp_path, 100)
    names = sorted(str(path) for path in tmp_path.glob("*.py"))
    random.Random(0).shuffle(names)
    held_out = {int(Path(name).stem[1:]) for i, name in enumerate(names) if i % HELD_OUT_STRIDE == 0}
    prompts = draw_prompts(encode, 5, 16, root=tmp_path).token_ids
    assert {ids[0] // 1000 for ids in prompts} == held_out
    for ids in prompts:
        assert list(ids) == list(range(ids[0], ids[0] + 16))


def test_files_that_training_skipped_are_skipped(tmp_path: Path) -> None:
    write_library(tmp_path, 3)
    for folder in ("site-packages", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("1")
    (tmp_path / "large.py").write_text("1 " * 200_000)
    assert sorted(path.name for path in library_files(tmp_path)) == ["m000.py", "m001.py", "m002.py"]


def test_seed_decides(tmp_path: Path) -> None:
    write_library(tmp_path, 60)
    first, again, other = (draw_prompts(encode, 6, 8, seed, tmp_path) for seed in (1, 1, 2))
    assert first == again
    assert first.token_ids != other.token_ids


def test_more_prompts_than_files(tmp_path: Path) -> None:
    write_library(tmp_path, 20)
    prompts = draw_prompts(encode, 8, 8, root=tmp_path).token_ids
    assert len(prompts) == 8
    assert len(set(prompts)) > 1


def test_prompt_longer_than_any_file(tmp_path: Path) -> None:
    write_library(tmp_path, 20)
    with pytest.raises(InvalidArgumentError, match="prompt_len is 100"):
        draw_prompts(encode, 1, 100, root=tmp_path)
