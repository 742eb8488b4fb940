"""Opens engine files with changed headers and data, and runs those that open.

    python -m tests.native.cpu.mutated_files LIBRARY COUNT FILE...

Prints how many ran and how many were refused. LIBRARY takes the place of the package's own: a sanitized one.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from faser_trtllm import native
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.errors import FaserError
from faser_trtllm.partition.core_set import CoreSet
from tests.support.engine_harness import Harness

PREFIX = struct.Struct("<8sII")
NUMBERS = (-1, 0, 1, 2, 3, 31, 32, 64, 255, 256, 257, 4096, 2**31 - 1, 2**31, 2**63, 1e308, 0.5, None, "1", [], True)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The file with one or two changes of its header's values, or of its bytes."""
    kind = rng.randrange(4)
    if kind == 0:
        return content[: rng.randrange(len(content))]
    if kind == 1:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 20)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    magic, version, size = PREFIX.unpack_from(content)
    header = json.loads(content[PREFIX.size : PREFIX.size + size])
    for _ in range(kind - 1):
        folder, name = _place(header, rng)
        folder[name] = _value(folder[name], rng)
    text = json.dumps(header).encode()
    if len(text) > size:
        return content
    return PREFIX.pack(magic, version, size) + text.ljust(size) + content[PREFIX.size + size :]


def _place(header: dict[str, Any], rng: random.Random) -> tuple[Any, Any]:
    folder: Any = header
    while True:
        name = rng.choice(list(folder) if isinstance(folder, dict) else range(len(folder)))
        if not isinstance(folder[name], dict | list) or not folder[name] or rng.random() < 0.1:
            return folder, name
        folder = folder[name]


def _value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int) and rng.random() < 0.5:
        return max(0, value + rng.choice((-64, -2, -1, 1, 2, 64)))
    return rng.choice(NUMBERS)


def run(path: Path, core_set: CoreSet) -> None:
    """Two requests of some tokens; FaserError if the file is refused."""
    with CpuEngine.open(
        path, core_set, num_blocks=32, tokens_per_block=16, max_batch_size=2, max_num_tokens=16, max_seq_len=16
    ) as engine:
        vocab = engine.spec.vocab_size
        if not engine.spec.reads_target:
            Harness(engine).run([(0, [token % vocab for token in (1, 5, 9)], 0, 3), (1, [vocab - 1], 0, 1)])


def main(library: str, count: str, *files: str) -> None:
    native._LIBRARY = Path(library)
    rng = random.Random(1)
    contents = [Path(file).read_bytes() for file in files]
    num_run = num_refused = 0
    with tempfile.TemporaryDirectory() as folder, CoreSet(None, 2 if len(CoreSet(None).cores) > 1 else 1) as core_set:
        path = Path(folder) / "rank0.engine"
        for number in range(int(count) + len(contents)):
            whole = contents[number % len(contents)]
            path.write_bytes(whole if number < len(contents) else mutated(whole, rng))
            try:
                run(path, core_set)
                num_run += 1
            except FaserError:
                num_refused += 1
            if number + 1 == len(contents):
                assert num_refused == 0, "files that were not changed are refused"
    print(num_run, num_refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
