"""Directories of launches: what a dead launch left is found, what a living one holds is not touched."""

import os
import subprocess
import sys
import tempfile

import pytest

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.launch.run_dir import RunDir, remove_stale

_HOLD = """
import time
from faser_trtllm.serving.launch.run_dir import RunDir
held = RunDir.open()
(held.path / "file").write_text("x")
print(held.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A directory of its own for temporary files: other launches on the machine clean up, too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_only_the_dead_are_cleaned_up(temporary):
    mine = RunDir.open()
    (mine.path / "file").write_text("x")
    other_s = temporary / "faser_of_somebody_else"
    other_s.mkdir()
    with subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True) as other:
        path = other.stdout.readline().strip()
        assert remove_stale() == []
        assert os.path.exists(os.path.join(path, "file"))
        other.kill()
    assert list(map(str, remove_stale())) == [path]
    assert sorted(temporary.iterdir()) == sorted([mine.path, other_s])
    mine.close()
    assert list(temporary.iterdir()) == [other_s]


def test_it_is_for_this_user_only(temporary):
    held = RunDir.open()
    assert held.path.stat().st_mode & 0o777 == 0o700
    held.close()


def test_a_place_that_cannot_be_written_to_is_a_sentence(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(UnavailableError, match=r"^/proc is not writable: .*; free space or permit it, or set TMPDIR$"):
        RunDir.open()
