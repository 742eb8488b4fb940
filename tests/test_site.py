"""The documentation's site builds without a warning: links, headings, code and tables are in order."""

import re
import subprocess
import sys

import pytest

from tests.support.triton_server import ROOT

for package in ("furo", "myst_parser", "sphinx"):
    pytest.importorskip(package, reason="needs the extra docs, which ./build.sh docs installs")

PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md"))


def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    missing = [page for page in PAGES if page.parts[0] != "observability" and not (tmp_path / f"{page}.html").is_file()]
    assert missing == []
    assert re.search(r'href="reference/cli\.html"', (tmp_path / "index.html").read_text())
