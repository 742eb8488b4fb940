"""faser generate with a guide, given as text or in a file."""

import json
import re

import pytest
from typer.testing import CliRunner

from faser_trtllm.commands.generate import read_guide
from faser_trtllm.commands.table import load
from faser_trtllm.errors import InvalidArgumentError
from tests.support.engine_dirs import make_engine_dir

SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 2, "max_seq_len": 256, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


def generate(engine_dir, *arguments):
    command = ["--engine_dir", str(engine_dir), "--prompt", "hello", "--max_tokens", "100"]
    return CliRunner().invoke(load("generate"), [*command, "--num_threads", "1", *arguments])


def test_outputs_follow_the_guide(engine_dir, tmp_path):
    (tmp_path / "schema.json").write_text(SCHEMA)
    speculation = ("--speculation", "fixed:3")
    by_schema = generate(engine_dir, "--guided_json", str(tmp_path / "schema.json"), *speculation)
    assert json.loads(by_schema.stdout) in ({"a": 1}, {"a": 2})
    by_regex = generate(engine_dir, "--guided_regex", "[ab]{3}c", *speculation)
    assert re.fullmatch("[ab]{3}c\n", by_regex.stdout)


def test_a_wrong_guide_is_refused(engine_dir):
    done = generate(engine_dir, "--guided_regex", "a(b")
    assert isinstance(done.exception, InvalidArgumentError)
    assert str(done.exception).startswith("guided_regex is not a valid regex")


def test_guides_are_text_or_a_file(tmp_path):
    path = tmp_path / "guide"
    path.write_text("a+\n")
    assert read_guide(None, None) == {}
    assert read_guide(None, "a+") == read_guide(None, str(path))
    for times in (10, 100):  # longer than a name in a path may be, and than a path
        assert read_guide(SCHEMA * times, None)["guided_decoding_guide"] == SCHEMA * times
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_guide(None, str(path))
    with pytest.raises(InvalidArgumentError, match="both given"):
        read_guide("{}", "a")
