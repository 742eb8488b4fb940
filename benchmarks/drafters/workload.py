"""Workloads on held-out text: greedy and sampled completion, and edits that a capable target would make."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.prompts import HELD_OUT_STRIDE, draw_prompts, library_files

COMPLETION_PROMPT, EDIT_PROMPT = 96, 320  # tokens
FUNCTION_TOKENS = (90, 200)  # limits for an edited function
NEW_NAMES = ("value", "item", "result", "data", "entry")


@dataclass(frozen=True)
class Job:
    """A request of one stream. replay: the target's text; () for its own."""

    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float = 0.0
    replay: tuple[int, ...] = ()


def completions(tokenizer: Tokenizer, num_jobs: int, num_tokens: int, temperature: float) -> list[Job]:
    prompts = draw_prompts(tokenizer.encode, num_jobs, COMPLETION_PROMPT).token_ids
    return [Job(prompt, num_tokens, temperature) for prompt in prompts]


def edits(tokenizer: Tokenizer, num_jobs: int, root: Path | None = None, seed: int = 0) -> list[Job]:
    """Return edits: a prompt with a function and a comment that asks for a small change, and the changed function.

    Changes rename a variable or the function, or add an argument.
    root: a folder of Python sources, by default the standard library.
    """
    rng = random.Random(seed)
    found = list(_functions(tokenizer, root or Path(sysconfig.get_paths()["stdlib"])))
    rng.shuffle(found)
    jobs: list[Job] = []
    for before, source, name, variables in found:
        if len(jobs) == num_jobs:
            break
        request, answer = _edit(source, name, variables, len(jobs) % 3, rng)
        head, rest = answer.split("\n", 1)
        prompt = f"{before[-4000:]}{source}\n\n{request}\n{head}"
        known, whole = tokenizer.encode(prompt), tokenizer.encode(f"{prompt}\n{rest}\n\n\n")
        replay = whole[len(known) :]
        if whole[: len(known)] == known and len(known) >= EDIT_PROMPT and len(replay) >= 60:
            jobs.append(Job(tuple(known[-EDIT_PROMPT:]), len(replay), replay=tuple(replay)))
    return jobs


def _functions(tokenizer: Tokenizer, root: Path) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """Yield functions: preceding text, source, name, and names of variables that occur more than once."""
    for file in library_files(root)[::HELD_OUT_STRIDE]:
        text = file.read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines(keepends=True)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.decorator_list:
                continue
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            variables = sorted(name for name in _variables(node) if len(re.findall(rf"\b{name}\b", source)) > 1)
            if variables and FUNCTION_TOKENS[0] <= len(tokenizer.encode(source)) <= FUNCTION_TOKENS[1]:
                yield "".join(lines[: node.lineno - 1]), source, node.name, variables


def _variables(node: ast.FunctionDef) -> set[str]:
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return (stored | {argument.arg for argument in node.args.args}) - {"self", "_"}


def _edit(source: str, name: str, variables: Sequence[str], kind: int, rng: random.Random) -> tuple[str, str]:
    """Return the request for a change, and the changed function."""
    if kind == 0:
        old = rng.choice(variables)
        new = rng.choice([candidate for candidate in NEW_NAMES if candidate != old])
        return f"# As above, but {old} is called {new}:", re.sub(rf"\b{old}\b", new, source)
    if kind == 1:
        return f"# As above, but called {name}_v2:", re.sub(rf"\b{name}\b", f"{name}_v2", source)
    head, rest = source.split("\n", 1)
    head = head.replace("):", ", verbose=False):", 1)
    return "# As above, with verbose=False, which prints the name:", (
        f"{head}\n    if verbose:\n        print({name!r})\n{rest}"
    )
