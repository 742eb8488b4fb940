"""faser's commands in a process with the virtual GPU."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest


def run_faser(*arguments: str) -> str:
    """Return what a command prints; it must succeed."""
    from faser_trtllm.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["faser", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return out.getvalue()
