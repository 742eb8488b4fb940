"""Draw real prompts from Python sources that were held out from the demo pair's training."""

from __future__ import annotations

import glob
import os
import platform
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError

# The demo pair's training script holds out every 20th file of the same list; the constants must match it.
HELD_OUT_STRIDE = 20
MAX_FILE_BYTES = 400_000
SKIPPED = (
    "site-packages",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "idlelib/help",
    "test_unicode",
    "cjkencodings",
    "__pycache__",
    "turtledemo",
)
TRAINING_NUM_FILES = 1528


@dataclass(frozen=True)
class PromptSet:
    """Prompts of equal length. held_out: the library has as many files as in the pair's training."""

    token_ids: tuple[tuple[int, ...], ...]
    source: str
    held_out: bool


def library_files(root: Path) -> list[Path]:
    """Return the library's sources in the training script's order."""
    files = sorted(
        file
        for file in glob.glob(f"{root}/**/*.py", recursive=True)
        if not any(part in file for part in SKIPPED) and os.path.getsize(file) < MAX_FILE_BYTES
    )
    random.Random(0).shuffle(files)
    return [Path(file) for file in files]


def draw_prompts(
    encode: Callable[[str], list[int]],
    num_prompts: int,
    prompt_len: int,
    seed: int = 0,
    root: Path | None = None,
) -> PromptSet:
    """Draw num_prompts windows of prompt_len tokens, from different held-out files if there are enough.

    root: a folder of Python sources; None: the standard library. InvalidArgumentError if no file is long enough.
    """
    files = library_files(root or Path(sysconfig.get_paths()["stdlib"]))
    rng = random.Random(seed)
    order = files[::HELD_OUT_STRIDE]
    rng.shuffle(order)
    texts: list[list[int]] = []
    for file in order:
        ids = encode(file.read_text(encoding="utf-8", errors="ignore"))
        if len(ids) > prompt_len:
            texts.append(ids)
        if len(texts) == num_prompts:
            break
    if not texts:
        raise InvalidArgumentError(
            f"prompt_len is {prompt_len}, but no held-out file of the standard library has more tokens; lower it"
        )
    prompts = []
    for i in range(num_prompts):
        ids = texts[i % len(texts)]
        start = rng.randrange(len(ids) - prompt_len)
        prompts.append(tuple(ids[start : start + prompt_len]))
    source = f"standard library of Python {platform.python_version()}, {len(order)} of {len(files)} files"
    return PromptSet(tuple(prompts), source, held_out=root is None and len(files) == TRAINING_NUM_FILES)
