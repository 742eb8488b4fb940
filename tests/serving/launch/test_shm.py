"""Shared memory names: what a dead launch left is found, what a living one holds is not touched."""

import subprocess
import sys

from faser_trtllm.serving.launch import shm

_HOLD = """
import sys, time
from pathlib import Path
from faser_trtllm.serving.launch import shm
shm.SHM_DIR = Path(sys.argv[1])
held = shm.ShmPrefix.open()
(shm.SHM_DIR / f"{held.prefix}region").write_bytes(b"x")
print(held.prefix, flush=True)
time.sleep(60)
"""


def test_only_the_dead_are_cleaned_up(tmp_path, monkeypatch):
    """In a directory of its own: other launches on the machine clean up, too."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    mine = shm.ShmPrefix.open()
    (tmp_path / f"{mine.prefix}region").write_bytes(b"x")
    with subprocess.Popen([sys.executable, "-c", _HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        prefix = other.stdout.readline().strip()
        assert prefix not in shm.remove_stale()
        assert (tmp_path / f"{prefix}region").exists()
        other.kill()
    assert prefix in shm.remove_stale()
    assert not list(tmp_path.glob(f"{prefix}*"))
    assert mine.regions() == sorted([f"{mine.prefix}lock", f"{mine.prefix}region"])
    mine.close()
    assert mine.regions() == []
