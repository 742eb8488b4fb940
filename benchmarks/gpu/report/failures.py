"""What failed, one sentence per section: what to read first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLIER = "earlier run: "  # before the status of a section that this run did not run
OK, SKIPPED = "ok", "skipped: "


def failures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(section, sentence) of every section of gpu.json that is neither ok nor skipped, in the report's order."""
    return [
        (name, _sentence(data["status"], data.get("errors", ())))
        for name, data in report["sections"].items()
        if not _is_fine(data["status"].removeprefix(EARLIER))
    ]


def skipped(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(section, reason) of the sections whose subject is not installed."""
    found = [(name, data["status"].removeprefix(EARLIER)) for name, data in report["sections"].items()]
    return [(name, status.removeprefix(SKIPPED)) for name, status in found if status.startswith(SKIPPED)]


def _is_fine(status: str) -> bool:
    return status == OK or status.startswith(SKIPPED)


def _sentence(status: str, errors: Any) -> str:
    """The status, and the first error, which later ones often follow from."""
    words = status
    if errors:
        words += f"; first: {errors[0]}"
    return " ".join(words.split())
