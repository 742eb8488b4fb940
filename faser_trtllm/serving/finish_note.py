"""The finish_reason that clients see: marked where the output is not the target's."""

from __future__ import annotations

SYNTHETIC = "synthetic_acceptance"
_MARK = f"; {SYNTHETIC}"


def spell_finish(reason: str, is_synthetic: bool) -> str:
    return reason + _MARK if is_synthetic else reason


def read_finish(text: str) -> tuple[str, bool]:
    """What spell_finish was given."""
    return text.removesuffix(_MARK), text.endswith(_MARK)
