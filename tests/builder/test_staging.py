"""A directory replaces another whole, or the other stays."""

from pathlib import Path

import pytest

from faser_trtllm.builder.staging import staged_directory


def written(path: Path, text: str) -> None:
    with staged_directory(path) as staging:
        (staging / "file").write_text(text)


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    for text in ("old", "new"):
        written(tmp_path / "engines", text)
        assert (tmp_path / "engines" / "file").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["engines"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_if_the_last_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    written(tmp_path / "engines", "old")
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.suffix == ".building":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(type(error)):
        written(tmp_path / "engines", "new")
    assert (tmp_path / "engines" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]
