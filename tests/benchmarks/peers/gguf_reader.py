"""A second, independent reading of the GGUF format, for tests."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class GgufTensor:
    shape: tuple[int, ...]
    kind: int
    data: bytes

    def values(self) -> np.ndarray:
        """fp32, dequantized."""
        if self.kind == 0:
            return np.frombuffer(self.data, "<f4").reshape(self.shape)
        if self.kind == 30:
            bits = np.frombuffer(self.data, "<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        blocks = np.frombuffer(self.data, np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
        return (blocks["scale"][:, None].astype(np.float32) * blocks["quants"]).reshape(self.shape)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    data = path.read_bytes()
    position = 0

    def take(layout: str) -> Any:
        nonlocal position
        values = struct.unpack_from("<" + layout, data, position)
        position += struct.calcsize("<" + layout)
        return values[0] if len(values) == 1 else values

    def text() -> str:
        nonlocal position
        length = take("Q")
        position += length
        return data[position - length : position].decode()

    assert data[:4] == b"GGUF"
    position = 4
    version, num_tensors, num_keys = take("IQQ")
    assert version == 3
    metadata = {}
    for _ in range(num_keys):
        key, kind = text(), take("I")
        metadata[key] = text() if kind == 8 else take({4: "I", 6: "f"}[kind])
    infos = []
    for _ in range(num_tensors):
        name, num_dims = text(), take("I")
        dims = [take("Q") for _ in range(num_dims)]
        infos.append((name, tuple(reversed(dims)), *take("IQ")))
    start = -(-position // 32) * 32
    tensors = {}
    for name, shape, kind, offset in infos:
        assert offset % 32 == 0
        size = int(np.prod(shape))
        nbytes = {0: 4 * size, 30: 2 * size, 8: size // 32 * 34}[kind]
        assert start + offset + nbytes <= len(data)
        tensors[name] = GgufTensor(shape, kind, data[start + offset : start + offset + nbytes])
    return metadata, tensors
