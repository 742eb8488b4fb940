"""The bench of long prompts on a tiny model: chunks, decode and a prefix that is found again; no time is asserted."""

from pathlib import Path

from benchmarks.long_context.__main__ import render
from benchmarks.long_context.measure import QUESTION_LEN, build_long, measure
from tests.support.checkpoints import make_checkpoint


def test_a_prompt_in_chunks_and_its_prefix_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny")
    engine_dir = build_long(checkpoint, tmp_path, max_seq_len=512, chunk=64)
    short, long = measure(engine_dir, [64, 400], num_decode_steps=3, num_threads=1)
    assert (short.num_chunks, long.num_chunks) == (1, 7)
    assert long.kv_bytes == 400 * short.kv_bytes // 64
    # Whole blocks of 32 tokens are found, of all but the question.
    assert long.num_reused == (400 - QUESTION_LEN) // 32 * 32
    assert "| 400 | 7 |" in render([short, long])
