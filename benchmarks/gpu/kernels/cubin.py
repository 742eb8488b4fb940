"""The resources, blocks per SM and instructions of compiled kernels, from ptxas' report and the cubin itself.

Instructions are counted without those that fill up. A kernel's walk is the shortest of the loops with the most matrix
instructions. Instructions have 16 bytes from compute capability 7.0 to 12.0, with the opcodes below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from faser_trtllm.ops.cuda.compiler import Compiled

_NOP, _BRANCH, _MMA = 0x918, 0x947, 0x23C
_INSTRUCTION_BYTES = 16
_TEXT = ".text."
WARP = 32
# Limits of an SM of compute capability 9.0.
MAX_WARPS, MAX_BLOCKS, REGISTERS, SHARED_BYTES = 64, 32, 65536, 228 << 10
_BLOCK_SHARED_BYTES = 1024  # that the driver adds to each block


@dataclass(frozen=True)
class Code:
    """A compiled kernel. walk: instructions of its loop of matrix instructions, walk_mma: these; 0 without one."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int
    walk: int
    walk_mma: int

    def blocks_per_sm(self, num_threads: int) -> int:
        """Return the blocks that run at a time on an SM of compute capability 9.0."""
        warps = -(-num_threads // WARP)
        of_registers = REGISTERS // (WARP * 8 * -(-self.registers // 8) * warps)
        of_shared = SHARED_BYTES // (_BLOCK_SHARED_BYTES + self.shared_bytes)
        return min(MAX_BLOCKS, MAX_WARPS // warps, of_registers, of_shared)


def codes_of(compiled: Compiled) -> dict[str, Code]:
    """Return the kernels of a cubin by name. Raises ValueError if it is no ELF file, such as an emulated GPU's."""
    cubin = compiled.path.read_bytes()
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError(f"{compiled.path.name} is no cubin")
    texts = dict(_texts(cubin))
    return {
        used.kernel: Code(
            used.kernel,
            used.registers,
            used.spill_bytes,
            used.shared_bytes,
            sum(low & 0xFFF != _NOP for low, _ in texts[used.kernel]),
            *_walk(texts[used.kernel]),
        )
        for used in compiled.resources
    }


def _texts(cubin: bytes) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the kernels of an ELF file and their instructions, each as two numbers of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + place * size) for place in range(count)]
    for name_at, _, _, _, start, num_bytes in headers:
        begin = headers[names][4] + name_at
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(_TEXT):
            words = struct.unpack_from(f"<{num_bytes // 8}Q", cubin, start)
            yield name.removeprefix(_TEXT), list(zip(words[::2], words[1::2], strict=True))


def _walk(text: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the instructions of the shortest loop with the most matrix instructions, and the number of these."""
    loops = [(0, 0)]
    for place, (low, high) in enumerate(text):
        if low & 0xFFF != _BRANCH:
            continue
        # The distance from the next instruction: bits 16 to 23, and those from 34 on.
        distance = ((high & 0x3FFFF) << 38) | (low >> 34 << 8) | (low >> 16 & 0xFF)
        distance -= (distance >> 55) << 56
        first = place + 1 + 4 * distance // _INSTRUCTION_BYTES
        if first < place:
            body = text[first : place + 1]
            loops.append((sum(one & 0xFFF == _MMA for one, _ in body), -len(body)))
    num_mma, instructions = max(loops)
    return (-instructions, num_mma) if num_mma else (0, 0)
