"""The prompts of sections that decode: held-out Python text in the pair's tokens."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.prompts import PromptSet, draw_prompts

NUM_PROMPTS, DRY_NUM_PROMPTS = 48, 3
DRY_PROMPT_LEN = 12


def bench_prompts(bench: Bench) -> PromptSet:
    tokenizer = Tokenizer.load(bench.options.checkpoint_dir)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    count = DRY_NUM_PROMPTS if bench.is_dry else NUM_PROMPTS
    return draw_prompts(encode, count, prompt_len(bench), bench.options.seed)


def prompt_len(bench: Bench) -> int:
    return min(DRY_PROMPT_LEN, bench.options.prompt_len) if bench.is_dry else bench.options.prompt_len


def max_tokens(bench: Bench) -> int:
    return min(16, bench.options.max_tokens) if bench.is_dry else bench.options.max_tokens
