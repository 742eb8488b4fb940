"""Failures of a run, one sentence per section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLIER = "earlier run: "  # before the status of a section that this run did not run
OK, SKIPPED = "ok", "skipped: "


def failures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (section, sentence) for every section of gpu.json that is neither ok nor skipped."""
    return [
        (name, _sentence(data["status"], data.get("errors", ())))
        for name, data in report["sections"].items()
        if not _is_fine(data["status"].removeprefix(EARLIER))
    ]


def skipped(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (section, reason) for sections whose subject is not installed."""
    found = [(name, data["status"].removeprefix(EARLIER)) for name, data in report["sections"].items()]
    return [(name, status.removeprefix(SKIPPED)) for name, status in found if status.startswith(SKIPPED)]


def _is_fine(status: str) -> bool:
    return status == OK or status.startswith(SKIPPED)


def _sentence(status: str, errors: Any) -> str:
    """Return the status and the first error, which often causes the others."""
    words = status
    if errors:
        words += f"; first: {errors[0]}"
    return " ".join(words.split())
