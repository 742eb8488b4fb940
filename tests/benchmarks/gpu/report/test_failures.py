"""The report begins with what failed, in one sentence each."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.report.failures import failures, skipped
from benchmarks.gpu.report.markdown import render_markdown


def report_of(**sections: Any) -> dict[str, Any]:
    """A report of sections by name: a status, or a status and errors."""
    found = {}
    for name, given in sections.items():
        status, *errors = (given,) if isinstance(given, str) else given
        found[name] = {"what": f"what {name} does", "status": status, "errors": errors, "seconds": 1.0}
    environment = {"date": "a day", "cpu": "a CPU", "git_commit": "", "git_dirty": False, "command_line": "faser"}
    return {"sections": found, "environment": environment, "options": {"dry_run": False}, "seconds": 3.0}


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (("2 measurement(s) failed", "accept is\nWRONG", "later"), "2 measurement(s) failed; first: accept is WRONG"),
        ("failed: RuntimeError: broken", "failed: RuntimeError: broken"),
        ("not run: no GPU", "not run: no GPU"),
        (("crashed with SIGSEGV, with what it had", "a"), "crashed with SIGSEGV, with what it had; first: a"),
        ("stopped after 9 s, with what it had", "stopped after 9 s, with what it had"),
        (("earlier run: 1 measurement(s) failed", "a"), "earlier run: 1 measurement(s) failed; first: a"),
    ],
)
def test_every_bad_end_is_a_failure(section: Any, sentence: str) -> None:
    assert failures(report_of(good="ok", bad=section)) == [("bad", sentence)]


def test_what_is_fine_or_not_installed_is_none() -> None:
    report = report_of(good="ok", before="earlier run: ok", left="skipped: no tool", old="earlier run: skipped: no gun")
    assert failures(report) == []
    assert skipped(report) == [("left", "no tool"), ("old", "no gun")]
    text = render_markdown(report)
    assert text.startswith("# faser bench gpu\n\nNothing failed.\n\nSkipped: `left`, no tool; `old`, no gun\n")
