"""A directory replaces another whole, or the other stays."""

from pathlib import Path

import pytest

from faser_trtllm.builder.staging import remove_leftovers, staged_directory


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


def test_what_another_process_writes_is_no_leftover(tmp_path: Path) -> None:
    """In another container its id may be ours, or nobody's."""
    final = tmp_path / "engines"
    with staged_directory(final) as staging:
        (staging / "file").write_text("new")
        other = staging.with_name(".engines.1.0123abcd.building")
        other.mkdir()
        remove_leftovers(final)
        assert staging.exists()
        assert not other.exists()
    assert (final / "file").read_text() == "new"


def test_what_was_there_is_no_leftover_until_it_is_replaced(tmp_path: Path) -> None:
    replaced = tmp_path / ".engines.1.0123abcd.replaced"
    replaced.mkdir()
    remove_leftovers(tmp_path / "engines")
    assert replaced.exists()
    written(tmp_path / "engines", "new")
    remove_leftovers(tmp_path / "engines")
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]
