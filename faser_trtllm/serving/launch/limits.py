"""Checks OS limits before the server starts and raises them where permitted."""

from __future__ import annotations

import resource
from collections.abc import Callable

from faser_trtllm.errors import UnavailableError

MIN_OPEN_FILES = 1024  # one per stream, and about 200 for Triton and the engine
MAX_OPEN_FILES = 1 << 16
# Triton parses JSON bodies on the stack: with the usual stack of 8 MB, a body of 4 MB crashes the server.
STACK_BYTES = 256 << 20


def check_limits() -> None:
    """Raise UnavailableError if a limit would crash the server later."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _at_most(MIN_OPEN_FILES, hard) < MIN_OPEN_FILES:
        raise UnavailableError(
            f"this process may open {hard} files, at least {MIN_OPEN_FILES} are needed; raise the limit (ulimit -Hn)"
        )


def raise_limits() -> Callable[[], None]:
    """Return a function that sets the limits of the stack and of open files, for the child to call before exec."""
    _, hard_stack = resource.getrlimit(resource.RLIMIT_STACK)
    _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    stack = _at_most(STACK_BYTES, hard_stack)
    files = _at_most(MAX_OPEN_FILES, hard_files)

    def apply() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard_stack))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard_files))

    return apply


def raise_open_files() -> int:
    """Set this process's limit of open files to MAX_OPEN_FILES, or a lower hard limit; return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _at_most(MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return files


def _at_most(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
