"""Measure the cost of guides on an engine directory.

Reports medians over interleaved rounds: tokens per second of the same prompts with and without a guide, with and
without speculation, and the time for masks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.sampling import guided_masks
from faser_trtllm.sampling.guided_masks import GuidedMasks
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator

PROMPTS = [
    "def fibonacci(n):",
    "class Cache:",
    "import os\n",
    "for name in names:",
    "try:\n",
    "x = [",
    "while True:",
    "#",
]
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
GUIDES: dict[str, dict[str, Any]] = {
    "none": {},
    "json_schema": {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps({"type": "array", "items": RECORD, "minItems": 100}),
    },
    "regex": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r"([a-z_]+ = [0-9]+\n){100,}"},
}
MAX_TOKENS = 128


class MaskClock:
    """A clock of the time that drafting and rejection sampling spend on masks, and a counter of masks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_masks = 0
        prepare = GuidedMasks.prepare

        def timed(masks: GuidedMasks, slot: int, position: int, num_rows: int) -> None:
            begun = time.perf_counter()
            prepare(masks, slot, position, num_rows)
            self.seconds += time.perf_counter() - begun

        # Drafting calls it, too.
        setattr(GuidedMasks, "prepare", timed)  # noqa: B010
        write = guided_masks._GuidedSlot._write

        def counted(*arguments: Any) -> Any:
            self.num_masks += 1
            return write(*arguments)

        setattr(guided_masks._GuidedSlot, "_write", counted)  # noqa: B010


def run(executor: Any, generator: TextGenerator, guide: dict[str, Any], batch_size: int) -> tuple[float, ...]:
    """Run one batch; return seconds, tokens, steps, drafted and accepted tokens."""
    finals: list[Any] = []
    for index, prompt in enumerate(PROMPTS[:batch_size]):
        request = TextRequest(text=prompt, max_tokens=MAX_TOKENS, end_ids=(), stream=False, **guide)
        generator.compile_guide(request)
        generator.submit(str(index), request, finals.append)
    begun, steps = time.perf_counter(), 0
    while executor.step():
        steps += 1
    seconds = time.perf_counter() - begun
    counts = [f.statistics for f in finals]
    total = [sum(getattr(c, f"num_{name}_tokens") for c in counts) for name in ("output", "draft", "accepted")]
    return seconds, total[0], steps, total[1], total[2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench guided", description=__doc__)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    args = parser.parse_args(argv)
    engine_dir, rounds = args.engine_dir, args.rounds
    clock = MaskClock()
    tokenizer = Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir)
    found: dict[tuple[str, int, str], list[tuple[float, ...]]] = {}
    opened = {s: open_executor(engine_dir, ExecutorConfig(speculation=s)) for s in ("off", "fixed:4")}
    generators = {s: TextGenerator(executor, tokenizer) for s, executor in opened.items()}
    for number in range(rounds + 1):
        for speculation, executor in opened.items():
            for batch_size in (1, 8):
                for name in random.sample(list(GUIDES), len(GUIDES)):
                    guide = GUIDES[name]
                    clock.seconds, clock.num_masks = 0.0, 0
                    seconds, tokens, steps, drafted, accepted = run(
                        executor, generators[speculation], guide, batch_size
                    )
                    if number:  # the first round is a warm-up
                        row = (tokens / seconds, 1e3 * clock.seconds / steps, clock.num_masks / steps)
                        share = accepted / drafted if drafted else 0.0
                        found.setdefault((speculation, batch_size, name), []).append((*row, share))
    print("speculation batch guide        tok/s  mask ms/step  masks/step  acceptance")
    for (speculation, batch_size, name), rows in sorted(found.items()):
        rate, mask_ms, masks, share = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{speculation:11} {batch_size:5} {name:12} {rate:7.0f} {mask_ms:13.3f} {masks:11.1f} {share:11.2f}")
    for executor in opened.values():
        executor.close()


if __name__ == "__main__":
    main()
