"""Memory that building and loading hold in addition to mapped files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint

MEASURED = """
import json, sys, threading, time
from pathlib import Path
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

peak, done = 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous_bytes())

checkpoint, output, backend = sys.argv[1:]
before = anonymous_bytes()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
options = {"max_seq_len": 64, "max_batch_size": 1, "max_num_tokens": 16}
engines = build_engines(BuildOptions(Path(checkpoint), None, Path(output), backend=backend, **options))
done.set()
watcher.join()
found = {"built": peak - before}
if backend == "cpu":
    before = anonymous_bytes()
    limits = {"num_blocks": 2, "tokens_per_block": 32, "max_batch_size": 1, "max_num_tokens": 16, "max_seq_len": 64}
    with CoreSet(num_threads=1) as core_set, CpuEngine.open(engines.target_path, core_set, **limits) as engine:
        found |= {"loaded": anonymous_bytes() - before, "workspace": engine.memory_bytes}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        hidden_size=1024,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=3072,
        sharded=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_checkpoint_is_mapped_and_streamed(checkpoint: Path, tmp_path: Path, backend: str) -> None:
    """Weights pass through memory tensor by tensor: 1.2 times the largest shard would be too much already."""
    shards = [path.stat().st_size for path in checkpoint.glob("*.safetensors")]
    assert len(shards) == 3
    command = [sys.executable, "-c", MEASURED, str(checkpoint), str(tmp_path / "engine"), backend]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert 0 < found["built"] < 1.2 * max(shards)
    if backend == "cpu":
        assert found["loaded"] < found["workspace"] + 0.25 * max(shards)
