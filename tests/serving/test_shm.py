"""Shared memory names: what a dead launch left is found, what a living one holds is not touched."""

import subprocess
import sys

from faser_trtllm.serving.shm import SHM_DIR, ShmPrefix, remove_stale

_HOLD = """
import sys, time
from faser_trtllm.serving.shm import SHM_DIR, ShmPrefix
shm = ShmPrefix.open()
(SHM_DIR / f"{shm.prefix}region").write_bytes(b"x")
print(shm.prefix, flush=True)
time.sleep(60)
"""


def test_only_the_dead_are_cleaned_up():
    mine = ShmPrefix.open()
    (SHM_DIR / f"{mine.prefix}region").write_bytes(b"x")
    with subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True) as other:
        prefix = other.stdout.readline().strip()
        assert prefix not in remove_stale()
        assert (SHM_DIR / f"{prefix}region").exists()
        other.kill()
    assert prefix in remove_stale()
    assert not list(SHM_DIR.glob(f"{prefix}*"))
    assert mine.regions() == sorted([f"{mine.prefix}lock", f"{mine.prefix}region"])
    mine.close()
    assert mine.regions() == []
