"""Fixtures of fake engines: a tokenizer, and its directory."""

from __future__ import annotations

import pytest

from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.checkpoints import write_tokenizer


@pytest.fixture(scope="session")
def fake_engine_dir(tmp_path_factory):
    """A tokenizer of 320 entries, and no engine."""
    directory = tmp_path_factory.mktemp("fake")
    write_tokenizer(directory, 320)
    return directory


@pytest.fixture(scope="session")
def tokenizer(fake_engine_dir):
    return Tokenizer.load(fake_engine_dir)
