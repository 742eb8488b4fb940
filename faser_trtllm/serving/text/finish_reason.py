"""The finish_reason that clients see. With synthetic_acceptance it has a mark: the output is not the target's."""

from __future__ import annotations

SYNTHETIC = "synthetic_acceptance"
_MARK = f"; {SYNTHETIC}"


def spell_finish(reason: str, is_synthetic: bool) -> str:
    return reason + _MARK if is_synthetic else reason


def read_finish(text: str) -> tuple[str, bool]:
    """Split the result of spell_finish into (reason, is_synthetic)."""
    return text.removesuffix(_MARK), text.endswith(_MARK)
