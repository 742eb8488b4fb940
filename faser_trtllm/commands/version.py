"""`faser version`."""

from __future__ import annotations

from faser_trtllm import __version__


def version() -> None:
    """Print the version and the CPU engine's instruction set."""
    from faser_trtllm.native import isa

    print(f"faser_trtllm {__version__}, CPU engine: {isa()}")
