"""Requests of a guide share a lexer, which grows with their texts. It does not stay, and fails no later requests."""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm.core.guide import GuideError
from faser_trtllm.guided import compiler as compiler_module
from faser_trtllm.guided.compiler import GuideCompiler
from faser_trtllm.guided.spec import GuideSpec
from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.triton_server import ROOT

EXPLODING = GuideSpec("regex", "(a|b)*a(a|b){200}")  # each text has lexer states of its own: 20 KB per mask
PLAIN = GuideSpec("regex", "[a-z]{5}")


@pytest.fixture
def compiler():
    tokenizer = Tokenizer.load(ROOT / "engines" / "demo" / "target")
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


def walk(state, rng, num_tokens):
    mask = np.zeros(4096 // 32, np.uint32)
    for _ in range(num_tokens):
        state.fill(mask)
        token_ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not token_ids.size:
            return
        state.advance([int(rng.choice(token_ids))])


def walk_often(guide, rng):
    for _ in range(200):
        walk(guide.start(()), rng, 30)


def test_requests_are_served_after_those_that_filled_the_lexer(compiler):
    rng = np.random.default_rng(0)
    guide = compiler.compile(EXPLODING)
    with pytest.raises(GuideError, match="too many states"):
        walk_often(guide, rng)
    with pytest.raises(GuideError, match="too many states"):
        walk(guide.start(()), rng, 30)
    assert compiler.find(EXPLODING) is None
    walk(compiler.compile(EXPLODING).start(()), rng, 30)


def test_guides_that_have_grown_are_released(compiler):
    for spec in (EXPLODING, PLAIN):
        walk(compiler.compile(spec).start(()), np.random.default_rng(0), 60)
    compiler.release()
    assert compiler.find(EXPLODING) is None
    assert compiler.find(PLAIN) is not None, "it has computed few masks"


def test_few_bytes_of_guides_are_kept_while_no_request_runs(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_IDLE_BYTES", 2 << 20)
    specs = [GuideSpec("regex", letter) for letter in "abc"]
    for spec in specs:
        compiler.compile(spec)
    compiler.release()
    assert [compiler.find(spec) is not None for spec in specs] == [False, True, True], "each counts as 1 MiB"


def test_guides_that_have_grown_take_more_of_the_cache(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_BYTES", 18 << 20)
    compiler.compile(PLAIN)
    walk(compiler.compile(EXPLODING).start(()), np.random.default_rng(0), 60)
    compiler.compile(GuideSpec("regex", "a"))
    assert compiler.find(PLAIN) is None, "the three count as 1, 17 and 1 MiB"
    assert compiler.find(EXPLODING) is not None
