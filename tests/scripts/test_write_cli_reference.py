"""docs/reference/cli.md lists the commands and flags as they are."""

import subprocess
import sys

from faser_trtllm.commands.table import COMMANDS
from tests.support.triton_server import ROOT

SCRIPT = ROOT / "scripts" / "write_cli_reference.py"
PAGE = ROOT / "docs" / "reference" / "cli.md"


def test_the_page_is_current():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_has_a_section_and_a_flag_its_default():
    text = PAGE.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## faser {name}" for name in COMMANDS]
    assert "|`--http_port` `--port`|`8000`|" in text
    assert "|`--engine_dir`|required|" in text
