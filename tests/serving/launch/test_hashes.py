"""Engine files are hashed once in the life of `faser serve`, and a signal ends that."""

import hashlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from faser_trtllm.serving.launch.hashes import FileHashes, StoppedError
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server
from tests.support.waiting import wait_until

LARGE_BYTES = 64 << 20


@pytest.fixture
def engine_dir(tmp_path):
    return make_engine_dir(tmp_path / "pair", max_batch_size=2, max_seq_len=64, max_draft_len=2)


def add_file(engine_dir, num_bytes, sha256):
    """A file of zeros in the directory and in its manifest."""
    with (engine_dir / "large").open("wb") as file:
        file.truncate(num_bytes)
    manifest = json.loads((engine_dir / "manifest.json").read_text())
    manifest["files"]["large"] = {"bytes": num_bytes, "sha256": sha256}
    (engine_dir / "manifest.json").write_text(json.dumps(manifest))


def bytes_read(pid):
    return int(re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])


def test_a_file_that_changes_is_read_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"first")
    hashes = FileHashes()
    for content in (b"first", b"other", b"more than before"):
        path.write_bytes(content)
        assert hashes.of(path) == hashlib.sha256(content).hexdigest()
    times = os.stat(path)
    (tmp_path / "replacement").write_bytes(b"LESS than before")
    os.utime(tmp_path / "replacement", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "replacement").replace(path)
    assert hashes.of(path) == hashlib.sha256(b"LESS than before").hexdigest()


def test_reading_ends_once_it_is_told_to(tmp_path):
    path, stop = tmp_path / "file", threading.Event()
    path.write_bytes(b"abc")
    stop.set()
    with pytest.raises(StoppedError):
        FileHashes(stop).of(path)


@pytest.mark.triton
@pytest.mark.slow
def test_a_restart_does_not_read_the_engines_again(engine_dir, tmp_path):
    add_file(engine_dir, LARGE_BYTES, hashlib.sha256(bytes(LARGE_BYTES)).hexdigest())
    with Server(engine_dir, log=tmp_path / "log") as server:
        server.wait_ready()
        before = bytes_read(server.process.pid)
        assert before > LARGE_BYTES
        os.kill(server.triton_pid(), signal.SIGKILL)
        wait_until(lambda: server.output().count("ready:") == 2)
        assert bytes_read(server.process.pid) - before < LARGE_BYTES


def test_the_first_sigterm_ends_the_hashing(engine_dir, tmp_path):
    """The manifest's hash is wrong, so the exit status would differ if it had been compared."""
    add_file(engine_dir, 1 << 40, "0" * 64)
    with Server(engine_dir, log=tmp_path / "log") as server:
        wait_until(lambda: bytes_read(server.process.pid) > LARGE_BYTES)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
