"""The compiled kernels that an engine carries."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda import compiler


@dataclass(frozen=True, slots=True)
class KernelCode:
    """Compiles kernels for one target."""

    arch: str  # like "sm_90"
    kind: str  # "ptx" or "cubin"

    def __post_init__(self) -> None:
        if self.kind not in ("ptx", "cubin"):
            raise ConfigError(f"kind is {self.kind!r}; it must be 'ptx' or 'cubin'")

    def of(self, stem: str, **defines: int) -> bytes:
        """Return the code of a stem of plugins/cuda; defines restrict what is compiled and stored in the engine."""
        return compiler.compile_stem(stem, self.arch, self.kind, defines).path.read_bytes()
