"""Long words that nobody sends twice do not stay in memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.support.triton_server import ROOT

MAX_GROWTH_MIB = 12.0  # 4,000 words took 25 while the library kept 10,000
GROWTH = """
import ctypes, random, re, tempfile
from pathlib import Path
from faser_trtllm.models.tokenizer import Tokenizer

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def allocated_mib():
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        totals = file.read().decode().rpartition("</heap>")[2]
    size = lambda kind: sum(map(int, re.findall(kind + r' size="(\\d+)"', totals)))
    return (size('system type="current"') - size(r'type="(?:fast|rest)" count="\\d+"')) / 2**20

tokenizer = Tokenizer.load(Path("engines/demo/target"))
letters, random = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
before = allocated_mib()
for _ in range(4000):
    tokenizer.encode("".join(random.choices(letters, k=200)))
print(allocated_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_info is glibc's")
def test_the_memory_of_words_is_bounded() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.5 < float(done.stdout) < MAX_GROWTH_MIB
