"""The exception of a section whose subject is not installed."""

from __future__ import annotations


class Skipped(Exception):  # noqa: N818  # it is no error
    """Ends a section as skipped, not failed, with the reason."""
