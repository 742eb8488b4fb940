"""`faser bench golden`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.golden import main
from faser_trtllm.errors import InvalidArgumentError


def test_the_command_prints_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text("some-model:\n  thinking_off:\n    1: 1.5\n    2: 1.75\n")
    main([str(path)])
    printed = capsys.readouterr().out
    assert printed.startswith("# some-model/thinking_off: acceptance length 1.5 1.75; off by 0.00")
    assert yaml.safe_load(printed) == {"synthetic_acceptance": [0.5, 0.5]}
    with pytest.raises(InvalidArgumentError, match="curve is 'x', the file has some-model/thinking_off"):
        main([str(path), "--curve", "x"])
