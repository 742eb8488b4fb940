"""How a section ends whose subject is not installed."""

from __future__ import annotations


class Skipped(Exception):  # noqa: N818  # it is no error
    """With the reason. The section's status says so, and it has not failed."""
